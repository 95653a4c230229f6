"""Tensors under the names by which `MLACache.attend_heads` takes them."""

NAMES = ("c_kv", "k_rope", "q_nope", "q_rope", "w_uk", "w_uv")


def heads_of(*tensors):
    return dict(zip(NAMES, tensors, strict=True))
