"""Every method that codes tokens one by one goes through the public conformance kit, twice.

Once alone (codecs, slots, bytes) and once in the contiguous cache. The number beside each spec is
the limit of the relative error on N(0, 1) tokens, a few percent above what was measured.
"""

from kvpact.testing import CacheContract, MethodContract

SPECS = {
    "none": 0.0001,
    "none:sinks=4,window=64,dtype=fp16": 0.0003,
    "fp8": 0.028,
    "fp8:format=e5m2,scale=none": 0.06,
    "int:bits=5,window=3": 0.055,
    "int:bits=8": 0.0067,
    "int:bits=4,zero=true": 0.09,
    "q8_0": 0.0067,
    "turboquant:bits=3,sinks=0,window=0": 0.195,
    "turboquant:bits=4": 0.101,
    "turboquant:bits=4,mode=prod": 0.145,
    "tq3": 0.265,
    "polarquant": 0.187,
    "polarquant:levels=6,first=3,sinks=0,window=0": 0.277,
    "polarquant:levels=1,first=6/polarquant:levels=5": 0.187,
    "qjl": 0.55,
    "qjl:sketch=3,sinks=0,window=0/qjl:value_bits=4": 0.45,
    "int:bits=8,sinks=2/turboquant:bits=3,window=7": 0.192,
}
# Other widths of the same codecs: alone only.
ALONE = {
    "none:dtype=bf16": 0.002,
    "int:bits=2": 0.42,
    "int:bits=3": 0.19,
    "int:bits=4": 0.108,
    "int:bits=7,group=64,sinks=0": 0.02,
    "turboquant:bits=1": 0.615,
    "turboquant:bits=2": 0.355,
    "turboquant:bits=8,scale=unbiased": 0.0068,
}


def _classes():
    for spec, limit in (SPECS | ALONE).items():
        members = {"spec": spec, "max_relative_error": limit, "__module__": __name__}
        name = "".join(part.capitalize() for part in spec.replace("=", " ").split())
        for contract in (MethodContract, CacheContract) if spec in SPECS else (MethodContract,):
            title = f"Test{contract.__name__.removesuffix('Contract')}_{name}"
            yield title, type(title, (contract,), members)


globals().update(_classes())
