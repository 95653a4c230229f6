"""The layout of the bytes of one of an engine's pages.

It hands over `[P, H, N, C]`: pages, KV heads, tokens of a page, bytes of a token. The N * C bytes
of a head lie together, and hold the fields of K and then those of V, each `[units, *shape]` as in
kvpact's own pages. So a head of a page is what it is in a page of `PagedKVCache`, and kernels read
it where it lies.
"""

from __future__ import annotations

from math import ceil, lcm, prod

import torch
from torch import Tensor

from kvpact.cache.stream.codecs import codec_of
from kvpact.errors import GeometryError, SpecError
from kvpact.formats import TILE, Field
from kvpact.integrations.calibrated import NOTHING, Learnt
from kvpact.kernels import Segment
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


class PageForm:
    """Fields of K and V in a head's part of a page; `content`: bytes of a token, C."""

    def __init__(self, k: Codec, v: Codec, tokens: int) -> None:
        least = page_unit(k, v)
        if tokens < 1 or tokens % least:
            raise GeometryError(
                f"the pages have {tokens} tokens; kvpact needs a multiple of {least}: start vLLM "
                "with --block-size 128, or give ContinuousBatchingConfig page_size=256"
            )
        self.tokens = tokens
        self._places: list[list[tuple[Field, int, int]]] = []
        end = 0
        for codec in (k, v):
            places = []
            for field in codec.fields:
                size = tokens // field.tokens * prod(field.shape) * field.dtype.itemsize
                end += -end % field.dtype.itemsize
                places.append((field, end, size))
                end += size
            self._places.append(places)
        self.content = ceil(end / tokens)

    def fields(self, pages: Tensor) -> tuple[Segment, Segment]:
        """Return K's and V's fields of pages `[P, H, N, C]`, `[P, H, units, *shape]`, as views."""
        strides = (pages.shape[2] * pages.shape[3], pages.shape[3], 1) if pages.dim() == 4 else ()
        if (
            pages.dtype is not torch.uint8
            or pages.shape[2:] != (self.tokens, self.content)
            or pages.stride()[1:] != strides
        ):
            raise GeometryError(
                f"vLLM hands over pages {tuple(pages.shape)} {pages.dtype} of strides "
                f"{pages.stride()}; kvpact reads [P, H, {self.tokens}, {self.content}] uint8 with "
                "the tokens of a head side by side (VLLM_KV_CACHE_LAYOUT=LBHNC)"
            )
        heads = pages.as_strided(
            (*pages.shape[:2], self.tokens * self.content), (*pages.stride()[:2], 1)
        )
        k, v = (
            {
                field.name: torch.unflatten(
                    heads[:, :, start : start + size].view(field.dtype), 2, (-1, *field.shape)
                )
                for field, start, size in places
            }
            for places in self._places
        )
        return k, v


def page_unit(k: Codec, v: Codec) -> int:
    """Return the tokens of which a page has a multiple: those of a tile, or of a group."""
    return lcm(TILE, *(field.tokens for codec in (k, v) for field in codec.fields))
