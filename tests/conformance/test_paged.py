"""Methods go through the conformance kit in the paged cache, too."""

import re

from kvpact.testing import PagedCacheContract
from kvpact.testing.specs import method_specs

SPECS = [*method_specs(fitted=False), "turboquant:bits=2,mode=prod", "turboquant:bits=3,center=64"]


def _classes():
    for spec in SPECS:
        name = "".join(part.capitalize() for part in re.split(r"\W", spec))
        members = {"spec": spec, "__module__": __name__}
        yield f"TestPaged_{name}", type(f"TestPaged_{name}", (PagedCacheContract,), members)


globals().update(_classes())
