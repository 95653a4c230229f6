"""The specs whose tokens an engine's pages can hold, and their codecs."""

from __future__ import annotations

import torch

from kvpact.cache.stream.codecs import codec_of
from kvpact.errors import SpecError
from kvpact.integrations.calibrated import NOTHING, Learnt
from kvpact.methods import Codec
from kvpact.methods.trellis_learning import TrellisKeyCodec
from kvpact.spec import Spec


def check_serves(
    spec: Spec, setting: str, calibrated: bool = False, pages: str = "vLLM's pages"
) -> None:
    """Raise `SpecError` where an engine's pages can't hold a spec's tokens, `calibrated` or not."""
    ways = (
        "take 'turboquant', 'int', 'fp8', 'none' or "
        "'trellis:center=0,first=false,weights=false,blocks=false', with sinks=0"
    )
    for side, codec in zip("KV", codecs(spec, 64, 64, torch.float32), strict=True):
        reason, learnt = "", codec if isinstance(codec, TrellisKeyCodec) else None
        if (codec.learns_from or not codec.ready) and not (learnt and calibrated):
            reason = "learns from its tokens"
        elif codec.joint or codec.rotation is not None or codec.has_bias:
            reason = "stores more than slots of one head"
        elif codec.group > 1 and not (learnt and learnt.has_single):
            reason = f"packs {codec.group} tokens together"
        if reason:
            raise SpecError(
                f"{setting}={str(spec)!r}: the method of {side} {reason}, which {pages} can't "
                f"hold; {ways}"
            )
        if learnt and learnt.trellis.center > spec.key.window:
            raise SpecError(
                f"{setting}={str(spec)!r}: keys of a group of {codec.group} wait in the window, "
                f"which is smaller; write {str(spec.with_options(window=codec.group))!r}, or take "
                "center=0, which packs them one by one"
            )
    if spec.key.sinks or spec.value.sinks:
        raise SpecError(
            f"{setting}={str(spec)!r}: {pages} have no place for exact sinks; write "
            f"{str(spec.with_options(sinks=0))!r}"
        )
    if spec.key.window != spec.value.window:
        raise SpecError(
            f"{setting}={str(spec)!r}: K and V need windows of equal width; write "
            f"{str(spec.with_options(window=spec.key.window))!r}"
        )


def codecs(
    spec: Spec, dim: int, v_dim: int, dtype: torch.dtype, learnt: Learnt = NOTHING
) -> tuple[Codec, Codec]:
    """Return the codecs for keys and values `dim` and `v_dim` wide; `learnt`: of the layer."""
    k, v = codec_of(spec.key, True, dim, dtype), codec_of(spec.value, False, v_dim, dtype)
    if learnt[0] and isinstance(k, TrellisKeyCodec):
        k = k.restore(learnt[0])
        k = k if k.trellis.center else k.singly()
    return k, v
