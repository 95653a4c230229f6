"""Every method that learns from tokens goes through the conformance kit, fitted, three times.

Alone (codecs, what was learnt, slots, bytes), in the contiguous cache and on pages. The number
beside each spec is the limit of the relative error on N(0, 1) tokens, up to a width of 576: a few
percent above what was measured.
"""

from kvpact.testing import FittedCacheContract, FittedMethodContract, FittedPagedCacheContract

SPECS = {
    "lowrank:rank=16": 0.99,
    "lowrank:energy=0.9": 0.62,
    "vq:codebook_size=16": 0.61,
    "vq:codebook_size=256": 0.33,
    "hybrid:rank=32,quant_bits=4": 0.98,
    "hybrid:rank=1000,quant_bits=8": 0.0074,
}
# Other options of the same codecs: alone only.
ALONE = {
    "lowrank:rank=1000": 0.0003,
    "lowrank:rank=16,per_head=false,sinks=0,window=0": 0.99,
    "vq:codebook_size=300,dims=4": 0.33,
    "vq:codebook_size=16,dims=2,stages=2": 0.128,
    "vq:codebook_size=5,dims=3": 0.71,
    "hybrid:rank=1000,quant_bits=4": 0.13,
    "hybrid:rank=16,quant_bits=8,per_head=false/vq:codebook_size=16": 0.99,
}
CACHES = (FittedCacheContract, FittedPagedCacheContract)


def _classes():
    for spec, limit in (SPECS | ALONE).items():
        members = {"spec": spec, "max_relative_error": limit, "__module__": __name__}
        name = "".join(part.capitalize() for part in spec.replace("=", " ").split())
        for contract in (FittedMethodContract, *(CACHES if spec in SPECS else ())):
            title = f"Test{contract.__name__.removesuffix('Contract')}_{name}"
            yield title, type(title, (contract,), members)


globals().update(_classes())
