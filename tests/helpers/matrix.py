"""The matrix of specs: which spec goes through which checks of the kit (`kvpact.testing`).

What a cache does depends on a codec by a few facts (`Facts`): one spec for every combination that
occurs goes through the whole of the kit for caches, all others through the checks that depend on
the bytes that are stored. Methods go through the whole of theirs with their first example; other
examples and variants through the checks of what is stored. What goes through less than the whole
is checked at some of the shapes. The facts are read from the codecs, so a new method is in its
class, and in every test of it, by being registered.

What backends are compared over with torch (`ENCODED` and the like) are lists: these facts say
nothing of the code that their options decide on.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import NamedTuple

import pytest
import torch

from kvpact import parse_spec, testing
from kvpact.methods import Codec
from kvpact.methods.fitted import FittedCodec

CONTRACTS = {
    False: {
        "Method": testing.MethodContract, "Cache": testing.CacheContract,
        "Paged": testing.PagedCacheContract,
    },
    True: {
        "Method": testing.FittedMethodContract, "Cache": testing.FittedCacheContract,
        "Paged": testing.FittedPagedCacheContract,
    },
}  # fmt: skip
SOME_SHAPES = (testing.SHAPES[1], testing.SHAPES[4], testing.SHAPES[5])
"""For what others stand for: rows, heads, all widths, two dtypes, more than two segments. Caches of
joint heads, whose codec learns longest, do without the widest."""


ENCODED = (
    *(f"turboquant:bits={bits}" for bits in range(1, 9)), "turboquant:bits=4,scale=l2,seed=5",
    "turboquant:bits=3,scale=unbiased", "turboquant:bits=4,center=64",
    "turboquant:bits=2,center=128,scale=l2", *(f"int:bits={bits}" for bits in range(2, 9)),
    "int:bits=4,group=48", "int:bits=6,zero=true", "int:bits=8,zero=true,group=64",
    "int:bits=4,group=64,rotate=true", "int:bits=3,zero=true,rotate=true", "fp8", "fp8:format=e5m2",
    "fp8:scale=none", "fp8:scale=none,format=e5m2", "kivi:bits=2", "kivi:bits=4,group=64",
    "kivi:bits=3,group=128", "kvarn:bits=4", "kvarn:bits=2,group=32", "kvarn:bits=3,group=128",
    "kvarn:bits=8,group=32,seed=3",
)  # fmt: skip
"""Specs whose K and V have native encodings, without trellises."""

EXACT = ("none:dtype=fp32", "none:dtype=fp16", "none:dtype=bf16")
ATTENDED = (
    *(spec for spec in ENCODED if spec != "int:bits=4,group=48"),  # a width that torch attends over
    *EXACT,
    "none",
    "turboquant:bits=3,center=128,scale=unbiased",
    "int:bits=4,zero=true",
    "int:bits=3,zero=true,rotate=true/int:bits=8,rotate=true",
    "turboquant:bits=4/kivi:bits=2,window=17",
    "kivi:bits=4,sinks=0/fp8",
    "int:bits=8/turboquant:bits=3",
)
"""Specs that native attention is compared over: sides that are unlike, too."""

UNTREATED = "center=0,first=false,weights=false,blocks=false"
TRELLISES = (
    *(f"trellis:bits={bits},{UNTREATED}" for bits in range(1, 7)),
    *(f"trellis:bits={bits}" for bits in range(1, 7)),
    f"trellis:bits=4,states=8,seed=3,{UNTREATED}", "trellis:bits=3,states=8",
    "trellis:bits=4,center=128", "trellis:bits=3,center=0", "trellis:bits=4,center=0,first=false",
    "trellis:bits=2,weights=false,blocks=false,first=false",
    "trellis:bits=4,weights=false,blocks=false", "trellis:bits=5,blocks=false",
    "trellis:bits=2,weights=false,seed=4",
)  # fmt: skip
"""Compared at fewer places than `ENCODED`: torch's search through a trellis takes its time."""
LEARNT = (
    "trellis", "trellis:bits=3,center=0", "trellis:bits=5,center=128", "trellis:bits=6,first=false",
    "trellis:bits=2,weights=false", "trellis:bits=4,blocks=false",
    "trellis:bits=1,center=0,first=false", "trellis:bits=4,weights=false,blocks=false",
    "trellis:bits=3,center=0,weights=false,blocks=false",
)  # fmt: skip
"""Specs whose keys learn, in every combination of what they may learn."""

NOT_OF_PAGES = {"exact", "joint"}
"""Facts that change slots, which are compared with the contiguous cache's, and nothing of pages."""


class Facts(NamedTuple):
    """All that a cache has to know of the codecs of K and V."""

    k_groups: bool
    v_groups: bool
    learns: bool
    bias: bool
    joint: bool
    exact: bool
    fitted: bool


def codecs(spec: str) -> tuple[Codec, Codec]:
    """Return the codecs of K and V at an ordinary width."""
    return parse_spec(spec).codecs(64, 64, torch.float32)


@cache
def facts(spec: str) -> Facts:
    """Return the facts of a spec."""
    k, v = both = codecs(spec)
    return Facts(
        k.group > 1, v.group > 1, any(codec.learns_from > 0 for codec in both),
        any(codec.has_bias for codec in both), any(codec.joint for codec in both),
        any(codec.exact for codec in both), any(isinstance(codec, FittedCodec) for codec in both),
    )  # fmt: skip


def class_specs(specs: Iterable[str]) -> list[str]:
    """Return a spec for each combination of facts: the last, which has unlike sides if any has."""
    return list({facts(spec): spec for spec in specs}.values())


def page_specs(specs: Iterable[str]) -> list[str]:
    """Return specs of classes until each fact that pages depend on was there once."""
    seen: set[str] = set()
    found = []
    for spec in sorted(class_specs(specs), key=lambda spec: sum(facts(spec))):
        here = {name for name, holds in facts(spec)._asdict().items() if holds} - NOT_OF_PAGES
        if not found or here - seen:
            found.append(spec)
            seen |= here
    return found


def _kept(kind: str, spec: str, whole: bool) -> Callable[[str], bool]:
    """Return which checks a spec goes through, by what they depend on (`depends_on`)."""
    here = facts(spec)
    kept = {
        "groups": here.k_groups or here.v_groups,
        "bias": here.bias,
        "bytes": whole or kind != "Paged",  # those of pages are the contiguous cache's: "pages"
        "pages": True,
    }
    return lambda reason: kept.get(reason, whole)


def kit_classes(
    module: str, *kinds: str, fitted: bool, grouped: bool | None = None
) -> Iterator[tuple[str, type]]:
    """Yield names and classes of tests for a module, of kinds ``Method``, ``Cache``, ``Paged``."""
    examples = testing.example_specs(fitted=fitted, grouped=grouped)
    variants = testing.variant_specs(fitted=fitted, grouped=grouped)
    whole = {
        "Method": testing.method_specs(),
        "Cache": class_specs(testing.example_specs(fitted=fitted)),
        "Paged": page_specs(testing.example_specs(fitted=fitted)),
    }
    for kind in kinds:
        contract = CONTRACTS[fitted][kind]
        for spec, limit in (examples | (variants if kind == "Method" else {})).items():
            slow = fitted and spec not in examples  # they learn large codebooks
            complete = slow or spec in whole[kind]
            members = {"spec": spec, "max_relative_error": limit, "__module__": module}
            if facts(spec).joint and kind != "Method":
                members["shapes"] = SOME_SHAPES[:2]
            elif not complete:
                members["shapes"] = SOME_SHAPES
            if slow:
                members["pytestmark"] = pytest.mark.slow
            name = "".join(part.capitalize() for part in spec.replace("=", " ").split())
            title = f"Test{kind}_{name}"
            omitted = testing.without(contract, _kept(kind, spec, complete))
            yield title, type(title, (contract,), omitted | members)
