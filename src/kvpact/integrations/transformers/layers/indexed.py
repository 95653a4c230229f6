"""Layers that choose the tokens they attend to: what chooses is cached, and the choice is a mask.

An *index* scores all tokens for a query and names some of them: DeepSeek V3.2 and its kin (GLM,
A.X K2, Hunyuan V4, Mistral Large 4, dots3) single tokens, MiniMax M3 blocks, Qwen4 and GLM-5 by a
mask that they narrow themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpact.errors import KVPactError
from kvpact.integrations.transformers.held.handles import KVHandle, untraced
from kvpact.integrations.transformers.held.shared import SharedState
from kvpact.integrations.transformers.layers.full import CompressedLayer
from kvpact.integrations.transformers.layers.index_keys import IndexKeys


class CompressedIndexedLayer(IndexKeys, CompressedLayer):  # type: ignore
    """A layer whose K and V are compressed, with the keys of its index."""

    def __init__(self, shared: SharedState, index: int, **options: Any) -> None:
        super().__init__(shared, index)
        self.reset()

    def reset(self) -> None:
        """Forget the keys of the index."""
        self.forget_keys()
        self.indexer_position_ids: Tensor | None = None  # [3, B, T], Qwen4's first layer alone
        self._first: bool | None = None  # whether a call brings them before K and V

    @untraced
    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Append keys `[B, S, D]`; return all. Raises `KVPactError` after an interrupted call."""
        total, count = self.get_seq_length(), self.key_count or 0
        if self._first is None:
            self._first = total == count
        new = indexer_key_states.shape[1]
        before = total if self._first else total - new
        positions = self.indexer_position_ids
        if count != before or (positions is not None and positions.shape[-1] != before + new):
            raise KVPactError(
                f"the layer's index holds {count} tokens where K and V hold {before}: a call of "
                "the model was interrupted, or the snapshot had no index; begin again with reset()"
            )
        return self.append_keys(indexer_key_states)

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Append MiniMax M3's keys of the index `[B, 1, S, D]`; return those of all tokens."""
        return self.update_indexer(idx_k.squeeze(1)).unsqueeze(1)

    def index_lengths(self) -> set[int]:
        """Return how many tokens the parts of the index hold, those that there are."""
        found = set() if self.key_count is None else {self.key_count}
        if self.indexer_position_ids is not None:
            found.add(self.indexer_position_ids.shape[-1])
        return found

    def crop(self, tokens_to_remove: int) -> None:
        """Do nothing: `fit_index` is called when K and V have been cut."""

    def fit_index(self) -> None:
        """Forget what the index holds beyond K and V."""
        length = self.get_seq_length()
        if not length:
            self.reset()
            return
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids[..., :length]
        self.cut_keys(length)

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

    `indices`: tokens, `[B, S, n]`; `block_indices`: `[B, H_kv, S, n]`; negative ones are none.
    """
    tokens = kwargs.get("indices")
    if tokens is not None:
        if tokens.shape[-1] >= total and not bool((tokens < 0).any()):
            return mask
        kept = _scattered(tokens, total)[:, None]
    else:
        blocks: Tensor = kwargs["block_indices"]
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
    if mask is None:
        places = torch.arange(total, dtype=torch.long, device=kept.device)
        return kept & (places <= places[total - queries :, None])
    if mask.dtype == torch.bool:
        return mask & kept
    return mask.masked_fill(~kept, torch.finfo(mask.dtype).min)


def _scattered(indices: Tensor, count: int) -> Tensor:
    """Return a mask `[…, count]`, True at the indices `[…, n]`."""
    kept = torch.zeros(*indices.shape[:-1], count + 1, dtype=torch.bool, device=indices.device)
    places = indices.long().masked_fill(indices < 0, count)
    return kept.scatter_(-1, places, True)[..., :count]
