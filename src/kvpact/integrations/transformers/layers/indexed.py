"""Layers that choose the tokens they attend to: their index is cached, the choice is a mask.

An *index* scores all tokens for a query and names some of them: DeepSeek V3.2 and its kin (GLM,
A.X K2, Hunyuan V4, Mistral Large 4, dots3) single tokens, MiniMax M3 blocks, Qwen4 and GLM-5 by a
mask that they narrow themselves.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvpact.cache.stream.advance import MOST_STEP
from kvpact.errors import GeometryError, KVPactError
from kvpact.integrations.transformers.held.handles import KVHandle, untraced
from kvpact.integrations.transformers.held.shared import SharedState
from kvpact.integrations.transformers.layers.full import CompressedLayer
from kvpact.integrations.transformers.layers.index_scan import KeysHandle, PackedKeys
from kvpact.quantizers.channels import GROUP, to_integers


class IndexKeys:
    """Keys of an index: 8-bit `index_codes` with scales, an exact `index_tail` of 64 or more."""

    _shared: SharedState
    _index: int
    index_codes: Tensor | None
    index_scale: Tensor | None
    index_tail: Tensor | None

    def forget_keys(self) -> None:
        """Hold no keys."""
        self.index_codes = self.index_scale = self.index_tail = None

    @property
    def indexer_keys(self) -> Tensor | None:
        """Keys of all tokens, `[B, T, D]`; None before the first."""
        tail = self.index_tail
        if tail is None or self.index_codes is None or self.index_scale is None:
            return tail
        return PackedKeys(self.index_codes, self.index_scale, tail).whole()

    @indexer_keys.setter
    def indexer_keys(self, keys: Tensor) -> None:
        self.index_codes = self.index_scale = None
        self.index_tail = keys
        self._pack()

    def append_keys(self, new: Tensor) -> Tensor:
        """Append keys `[B, S, D]`; return all, the new ones exact; for few tokens a handle."""
        tail, new = self.index_tail, new.detach()
        if not new.shape[1]:  # of entries that are not whole yet
            held = self.indexer_keys
            return new if held is None else held
        whole = tail = new if tail is None else torch.cat([tail, new], 1)
        if self.index_codes is not None and self.index_scale is not None:
            compute = self._shared.compute
            requested = "auto" if compute is None else compute.requested
            keys = PackedKeys(self.index_codes, self.index_scale, tail, requested)
            few = new.shape[1] <= MOST_STEP and not new.is_meta
            whole = KeysHandle.of(keys) if few else keys.whole()
        self.index_tail = tail
        self._pack()
        return whole

    def _pack(self) -> None:
        """Make integers of the groups before the last 64 tokens."""
        tail = self.index_tail
        if tail is None or self._shared.specs[self._index].key.name == "none":
            return
        count = tail.shape[1] // GROUP * GROUP - GROUP
        if count > 0:
            codes, scale = to_integers(tail[:, :count], 1, 0)
            if self.index_codes is not None and self.index_scale is not None:
                codes = torch.cat([self.index_codes, codes], 1)
                scale = torch.cat([self.index_scale, scale], 1)
            self.index_codes, self.index_scale = codes, scale
            self.index_tail = tail[:, count:].clone()

    @property
    def key_count(self) -> int | None:
        """Tokens whose keys are held; None before the first."""
        if self.index_tail is None:
            return None
        packed = 0 if self.index_codes is None else self.index_codes.shape[1]
        return packed + self.index_tail.shape[1]

    def cut_keys(self, length: int) -> None:
        """Forget the keys from `length` on; at least one token is held then."""
        keys, codes = self.indexer_keys, self.index_codes
        if keys is None or keys.shape[1] <= length:
            return
        packed = 0 if codes is None else codes.shape[1]
        if codes is not None and self.index_scale is not None and packed >= length:
            kept = (length - 1) // GROUP  # groups; at least one token is exact
            packed = kept * GROUP
            self.index_codes = codes[:, :packed] if kept else None
            self.index_scale = self.index_scale[:, :kept] if kept else None
        self.index_tail = keys[:, packed:length].clone()

    def check_parts(self, parts: Mapping[str, Tensor], tokens: int) -> None:
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
        """Cut the index to the tokens of K and V."""
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
    """Return a mask `[B, 1 or H, S, T]` narrowed to an index's choice; unchanged if that is all.

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
