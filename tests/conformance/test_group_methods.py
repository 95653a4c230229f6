"""Every method that codes groups of tokens goes through the conformance kit.

The specs are those that registered methods name (`kvpact.testing.specs`): examples go through the
whole kit, further variants through the checks of codecs alone.
"""

from kvpact.testing import CacheContract, MethodContract
from kvpact.testing.specs import example_specs, variant_specs

CACHES = (CacheContract,)


def _classes():
    examples = example_specs(fitted=False, grouped=True)
    for spec, limit in (examples | variant_specs(fitted=False, grouped=True)).items():
        members = {"spec": spec, "max_relative_error": limit, "__module__": __name__}
        name = "".join(part.capitalize() for part in spec.replace("=", " ").split())
        for contract in (MethodContract, *(CACHES if spec in examples else ())):
            title = f"Test{contract.__name__.removesuffix('Contract')}_{name}"
            yield title, type(title, (contract,), members)


globals().update(_classes())
