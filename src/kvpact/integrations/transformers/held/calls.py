"""A log of the model's calls for a cache: token ids, and everything else K and V depend on."""

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from kvpact.errors import GeometryError
from kvpact.integrations.transformers.held.handles import untraced
from kvpact.integrations.transformers.versions import given_cache

_UNKNOWN = -1
_REASONS = (
    "an attention_mask that hides some",
    "position_ids that don't count up from 0",
    "a mask, positions or arguments of their own, before a snapshot",
    "a call that did not go through the model given to prefix_cache()",
)
_MASKED, PLAIN, BEFORE, _UNSEEN = range(4)
_KNOWN = {"input_ids", "attention_mask", "position_ids", "cache_position", "labels"}
_KNOWN |= {"logits_to_keep", "mm_token_type_ids"}
_NEVER = {"inputs_embeds", "encoder_hidden_states"}
"""Inputs that change K and V of text, too, in a model for images, video or sound."""


class CallLog:
    """The id and position of every token of a cache, and why its K and V depend on more."""

    def __init__(self) -> None:
        self.seen = 0  # nothing is looked at before somebody asks: no call waits for a device
        self._reasons = list(_REASONS)
        self._rows = torch.zeros(3, 0, dtype=torch.int64, device="cpu")

    def note(
        self,
        first: int,
        count: int,
        ids: Tensor | None = None,
        places: Tensor | None = None,
        reason: Tensor | int = PLAIN,
        device: torch.device | None = None,
    ) -> None:
        """Log `count` tokens from `first` on; ids are None where they are unknown."""
        end, room = first + count, self._rows.shape[1]
        device = device or self._rows.device
        if end > room or device != self._rows.device:
            with torch.inference_mode(False):  # calls outside of it write here, too
                rows = torch.zeros(3, max(2 * room, end, 256), dtype=torch.int64, device=device)
            rows[:, :room] = self._rows
            self._rows = rows
        rows, self.seen = self._rows[:, first:end], end
        rows[0] = _UNKNOWN if ids is None else ids.reshape(-1)
        rows[1] = (
            torch.arange(first, end, dtype=torch.int64, device=device)
            if places is None
            else places.reshape(-1)
        )
        rows[2] = reason

    def call(self, held: int, given: dict[str, Any], named: list[str]) -> None:
        """Log a coming call on a cache of `held` tokens; `named`: other arguments that matter."""
        if self.seen < held:
            self.note(self.seen, held - self.seen, reason=_UNSEEN)
        ids, mask, places = map(given.get, ("input_ids", "attention_mask", "position_ids"))
        tokens = given.get("inputs_embeds") if ids is None else ids
        if tokens is None:
            return  # the model will say what it lacks
        rows, count = tokens.shape[:2]
        reason: Tensor | int = PLAIN
        if mask is not None and (
            not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] < held + count
        ):
            reason = _MASKED
        elif mask is not None and rows == 1:
            reason = mask.min()  # 0 or 1
        elif mask is not None:  # rows may be chosen later, padded on the left or not
            reason = (mask[:, 1:] >= mask[:, :-1]).all()
        for name in named:
            if name not in self._reasons:
                self._reasons.append(name)
            reason = self._reasons.index(name)
        if places is not None and places.dim() == 3:  # one more axis where images are placed
            places = places[0] + (places - places[0]).abs().sum(0)
        alone = rows == 1
        places = places if alone and places is not None and places.numel() == count else None
        self.note(held, count, ids if alone else None, places, reason, tokens.device)

    def odd(self, held: int) -> bool:
        """Return whether K and V of some of the first tokens depend on more than ids."""
        rows = self._rows[:, : min(held, self.seen)]
        places = torch.arange(rows.shape[1], dtype=torch.int64, device=rows.device)
        return bool(((rows[1] != places) | (rows[2] != PLAIN)).any())

    def check(self, ids: Sequence[int], held: int, text: int) -> None:
        """Raise `GeometryError` unless the tokens held are these, and the first `text` theirs."""
        if self.seen < held:
            self.note(self.seen, held - self.seen, reason=_UNSEEN)
        known, places, reasons = self._rows[:, :held].cpu()
        given = torch.tensor(ids[:held], dtype=torch.int64, device="cpu")
        other = (known != given) & (known != _UNKNOWN)
        if other.any():
            at = int(other.int().argmax())
            raise GeometryError(
                f"token {at} is {int(given[at])} here, but the model was given {int(known[at])}: "
                "save() the ids that the model was given, from the first on"
            )
        odd = (
            (reasons != PLAIN) | (places != torch.arange(held, dtype=torch.int64, device="cpu"))
        )[:text]
        if odd.any():
            first = int(odd.int().argmax())
            why = self._reasons[int(reasons[first])]
            raise GeometryError(
                f"token {first} was computed with {why}: its K and V are not those of the token "
                "ids alone, so they can't be a prefix of other texts; reset() the cache"
            )


class CallWatch:
    """A model's hook that logs the arguments of a call in its `CompressedCache`."""

    def __init__(self, model: Any, media: bool) -> None:
        self._names = tuple(signature(model.forward).parameters)
        self._named = _NEVER | (set() if media else set(self._names) - _KNOWN)

    @untraced
    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Log the call."""
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        cache = given_cache(given)
        shared = getattr(cache, "_shared", None)
        if shared is not None and not _captured():
            named = [x for x in self._named if isinstance(given.get(x), Tensor)]
            shared.call_log.call(cache.get_seq_length(), given, named)


def _captured() -> bool:
    """Return whether a CUDA graph captures the call: its replays would not be logged."""
    made: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return made and torch.cuda.is_current_stream_capturing()


def watch(model: Any, media: bool) -> None:
    """Let a model's caches log its calls; a second time changes nothing."""
    if not any(isinstance(hook, CallWatch) for hook in model._forward_pre_hooks.values()):
        model.register_forward_pre_hook(CallWatch(model, media), with_kwargs=True)
