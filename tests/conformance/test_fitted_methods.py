"""Every method that learns from tokens goes through the conformance kit, fitted; on pages, too.

The specs are those that registered methods name (`kvpact.testing.specs`): examples go through the
whole kit; further variants, which learn large codebooks, through the checks of codecs alone, in
`make test-slow`.
"""

import pytest

from kvpact.testing import FittedCacheContract, FittedMethodContract, FittedPagedCacheContract
from kvpact.testing.specs import example_specs, variant_specs

CACHES = (FittedCacheContract, FittedPagedCacheContract)


def _classes():
    examples = example_specs(fitted=True)
    for spec, limit in (examples | variant_specs(fitted=True)).items():
        members = {"spec": spec, "max_relative_error": limit, "__module__": __name__}
        if spec not in examples:
            members["pytestmark"] = pytest.mark.slow
        name = "".join(part.capitalize() for part in spec.replace("=", " ").split())
        for contract in (FittedMethodContract, *(CACHES if spec in examples else ())):
            title = f"Test{contract.__name__.removesuffix('Contract')}_{name}"
            yield title, type(title, (contract,), members)


globals().update(_classes())
