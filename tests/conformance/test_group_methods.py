"""Every method that codes groups of tokens goes through the public conformance kit, twice.

Once alone (codecs, slots, bytes) and once in the contiguous cache. The number beside each spec is
the limit of the relative error on N(0, 1) tokens, a few percent above what was measured.
"""

from kvpact.testing import CacheContract, MethodContract

SPECS = {
    "turboquant:bits=3,center=64": 0.192,
    "turboquant:bits=3,mode=prod,center=64,sinks=0,window=0": 0.27,
    "kivi:bits=2": 0.48,
    "kivi:bits=4,sinks=0,window=0": 0.09,
    "kivi:bits=4,group=128,window=128": 0.12,
    "kvarn:bits=2": 0.6,
    "kvarn:bits=3,group=32,sinks=0,window=0": 0.26,
    "kvarn:bits=4,group=128": 0.122,
    "turboquant:bits=3,center=64/kivi:bits=2": 0.48,
    "kivi:bits=4/kvarn:bits=4": 0.122,
}
# Other widths of the same codecs: alone only.
ALONE = {
    "turboquant:bits=2,center=128": 0.355,
    "kivi:bits=2,group=64": 0.56,
}


def _classes():
    for spec, limit in (SPECS | ALONE).items():
        members = {"spec": spec, "max_relative_error": limit, "__module__": __name__}
        name = "".join(part.capitalize() for part in spec.replace("=", " ").split())
        for contract in (MethodContract, CacheContract) if spec in SPECS else (MethodContract,):
            title = f"Test{contract.__name__.removesuffix('Contract')}_{name}"
            yield title, type(title, (contract,), members)


globals().update(_classes())
