"""Layers that choose the tokens they attend to: what chooses is cached, and the choice is a mask.

An *index* scores all tokens for a query and names some of them: DeepSeek V3.2 and its kin (GLM,
A.X K2, Hunyuan V4, Mistral Large 4, dots3) single tokens, MiniMax M3 blocks, Qwen4 and GLM-5 by a
mask that they narrow themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvpact.errors import GeometryError, KVPactError
from kvpact.integrations.transformers.handles import KVHandle
from kvpact.integrations.transformers.layer import CompressedLayer
from kvpact.integrations.transformers.shared import SharedState
from kvpact.quantizers.channels import GROUP, from_integers, to_integers


class CompressedIndexedLayer(CompressedLayer):  # type: ignore[no-untyped-call]
    """A layer whose K and V are compressed, with the keys of its index.

    Keys are 8-bit integers, `index_codes` `[B, n, D]`, with `index_scale` per channel over 64
    tokens; at least the last 64 tokens are exact, `index_tail` `[B, T - n, D]`, and all of them
    where K is.
    """

    def __init__(self, shared: SharedState, index: int, **options: Any) -> None:
        super().__init__(shared, index)
        self.reset()

    def reset(self) -> None:
        """Forget the keys of the index."""
        self.index_codes: Tensor | None = None
        self.index_scale: Tensor | None = None
        self.index_tail: Tensor | None = None
        self.indexer_position_ids: Tensor | None = None  # [3, B, T], Qwen4's first layer alone
        self._first: bool | None = None  # whether a call brings them before K and V

    @property
    def indexer_keys(self) -> Tensor | None:
        """Keys of all tokens, `[B, T, D]`; None before the first."""
        tail = self.index_tail
        if tail is None or self.index_codes is None or self.index_scale is None:
            return tail
        packed = from_integers(self.index_codes, self.index_scale, 1, 0)
        return torch.cat([packed.to(tail.dtype), tail], 1)

    @indexer_keys.setter
    def indexer_keys(self, keys: Tensor) -> None:
        self.index_codes = self.index_scale = None
        self.index_tail = keys
        self._pack()

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Append keys of the index `[B, S, D]`; return those of all tokens.

        Raises `KVPactError` where a call was interrupted between K and them.
        """
        held, new = self.indexer_keys, indexer_key_states.detach()
        total, count = self.get_seq_length(), 0 if held is None else held.shape[1]
        if self._first is None:
            self._first = total == count
        before = total if self._first else total - new.shape[1]
        positions = self.indexer_position_ids
        if count != before or (
            positions is not None and positions.shape[-1] != before + new.shape[1]
        ):
            raise KVPactError(
                f"the layer's index holds {count} tokens where K and V hold {before}: a call of "
                "the model was interrupted, or the snapshot had no index; begin again with reset()"
            )
        whole = new if held is None else torch.cat([held, new], 1)
        self.index_tail = new if self.index_tail is None else torch.cat([self.index_tail, new], 1)
        self._pack()
        return whole

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Append MiniMax M3's keys of the index `[B, 1, S, D]`; return those of all tokens."""
        return self.update_indexer(idx_k.squeeze(1)).unsqueeze(1)

    def _pack(self) -> None:
        """Make integers of the groups before the last 64 tokens."""
        tail = self.index_tail
        if tail is None or self.spec.key.name == "none":
            return
        count = tail.shape[1] // GROUP * GROUP - GROUP
        if count > 0:
            codes, scale = to_integers(tail[:, :count], 1, 0)
            if self.index_codes is not None and self.index_scale is not None:
                codes = torch.cat([self.index_codes, codes], 1)
                scale = torch.cat([self.index_scale, scale], 1)
            self.index_codes, self.index_scale = codes, scale
            self.index_tail = tail[:, count:].clone()

    def index_lengths(self) -> set[int]:
        """Return how many tokens the parts of the index hold, those that there are."""
        found = set()
        if self.index_tail is not None:
            packed = 0 if self.index_codes is None else self.index_codes.shape[1]
            found.add(packed + self.index_tail.shape[1])
        if self.indexer_position_ids is not None:
            found.add(self.indexer_position_ids.shape[-1])
        return found

    def crop(self, tokens_to_remove: int) -> None:
        """Do nothing: `fit_index` is called when K and V have been cut."""

    def fit_index(self) -> None:
        """Forget what the index holds beyond K and V."""
        length, keys, codes = self.get_seq_length(), self.indexer_keys, self.index_codes
        if not length:
            self.reset()
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids[..., :length]
        if not length or keys is None or self.index_tail is None or keys.shape[1] <= length:
            return
        packed = 0 if codes is None else codes.shape[1]
        if codes is not None and self.index_scale is not None and packed >= length:
            kept = (length - 1) // GROUP  # groups; at least one token is exact
            packed = kept * GROUP
            self.index_codes = codes[:, :packed] if kept else None
            self.index_scale = self.index_scale[:, :kept] if kept else None
        self.index_tail = keys[:, packed:length].clone()

    def check_index(self, parts: Mapping[str, Tensor], tokens: int) -> None:
        """Raise `GeometryError` unless parts of a snapshot are an index of so many tokens."""
        codes, scale, tail = (parts.get(f"index_{x}") for x in ("codes", "scale", "tail"))
        shapes = [None if x is None else tuple(x.shape) for x in (codes, scale, tail)]
        if tail is None:
            fits = codes is scale is None
        elif tail.dim() != 3 or codes is None or scale is None:
            fits = codes is scale is None and tail.dim() == 3 and tail.shape[1] == tokens
        else:
            rows, count, width = tail.shape
            groups, rest = divmod(tokens - count, GROUP)
            wanted = [(rows, tokens - count, width), (rows, groups, width)]
            fits = not rest and shapes[:2] == wanted and codes.dtype == torch.int8
            fits = fits and scale.dtype == torch.float32 and bool(scale.isfinite().all())
        numbers = tail is None or (tail.is_floating_point() and bool(tail.isfinite().all()))
        if not (fits and numbers):
            raise GeometryError(f"the snapshot has an index of {shapes}, not of {tokens} tokens")

    def _whole(self, side: str) -> Tensor | None:
        tokens = self._shared.waiting[self._index]
        if tokens is None:
            return super()._whole(side)
        new = tokens.k if side == "k" else tokens.v  # GLM-5 looks at the shape, in the call itself
        shape = new.shape[0], new.shape[1], tokens.total, new.shape[3]
        return KVHandle.of(tokens, side, shape, new)


def chosen(
    module: Any, mask: Tensor | None, queries: int, total: int, kwargs: dict[str, Any]
) -> Tensor | None:
    """Return a mask `[B, 1 or H, S, T]` narrowed to what an index chose; as it is if that is all.

    `indices` are tokens, `[B, S, n]`, `block_indices` blocks for each KV head, `[B, H_kv, S, n]`;
    of both, what is negative is none.
    """
    tokens, blocks = kwargs.get("indices"), kwargs.get("block_indices")
    if tokens is not None:
        if tokens.shape[-1] >= total and not bool((tokens < 0).any()):
            return mask
        kept = _scattered(tokens, total)[:, None]
    elif blocks is not None:
        size = getattr(getattr(module, "indexer", None), "block_size", None)
        if type(size) is not int:
            raise KVPactError(
                f"{type(module).__name__} passes blocks of tokens to attention and does not say "
                "how large they are (indexer.block_size): call "
                "model.set_attn_implementation('sdpa') before the cache is made"
            )
        count = -(-total // size)
        if blocks.shape[-1] >= count and not bool((blocks < 0).any()):
            return mask
        kept = _scattered(blocks, count).repeat_interleave(size, dim=-1)[..., :total]
        heads = module.config.num_attention_heads
        kept = kept.repeat_interleave(heads // kept.shape[1], dim=1)
    else:
        return mask
    if mask is None:
        places = torch.arange(total, dtype=torch.long, device=kept.device)
        return kept & (places <= places[total - queries :, None])
    if mask.dtype == torch.bool:
        return mask & kept
    return mask.masked_fill(~kept, torch.finfo(mask.dtype).min)


def _scattered(indices: Tensor, count: int) -> Tensor:
    """Return `[…, count]`, which of so many are among the indices `[…, n]`."""
    kept = torch.zeros(*indices.shape[:-1], count + 1, dtype=torch.bool, device=indices.device)
    places = indices.long().masked_fill(indices < 0, count)
    return kept.scatter_(-1, places, True)[..., :count]
