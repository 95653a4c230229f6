"""A model's decode step as one CUDA graph, replayed without Python in between.

Kernels read from the device how many tokens are held and where they lie, so the same launches serve
every step. The host only counts. A step that packs a group of tokens (every 64th with the default
spec) runs as any other call of the model does, and so do steps before a method has learnt what it
learns from the first tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpact.cache.layer.held import Held
from kvpact.cache.layer.layer import CacheLayer
from kvpact.cache.layer.moment import rewind
from kvpact.cache.layer.quick import counted
from kvpact.errors import BackendUnavailable, GeometryError, KVPactError
from kvpact.integrations.transformers.cache import CompressedCache
from kvpact.integrations.transformers.versions import named
from kvpact.kernels.triton.backend import installed

if TYPE_CHECKING:
    from kvpact.kernels.triton.step.step import TritonStep

ROOM = 256  # tokens for which room is made at a time
_WARM = 3


class DecodeGraph:
    """Decode steps of a model over a `CompressedCache`, replayed as one CUDA graph.

    Parameters
    ----------
    model : PreTrainedModel
        In evaluation mode, with attention ``kvpact``.
    cache : CompressedCache
        Made with ``check="deferred"``; holds a prompt of at least one token.
    room : int
        Tokens for which room is made in the cache at a time; the graph is captured again after so
        many.

    Raises
    ------
    BackendUnavailable
        Triton is not installed; or a layer can't be stepped by the device alone, and the message
        says which, and why.
    KVPactError
        Layers of the model hold more than compressed K and V.

    Examples
    --------
    >>> cache = CompressedCache(model, "turboquant:bits=4", check="deferred")  # doctest: +SKIP
    >>> logits = model(prompt, cache=cache).logits[:, -1:]  # doctest: +SKIP
    >>> steps = DecodeGraph(model, cache)  # doctest: +SKIP
    >>> for _ in range(100):  # doctest: +SKIP
    ...     logits = steps(logits.argmax(-1))
    """

    def __init__(self, model: PreTrainedModel, cache: CompressedCache, room: int = ROOM) -> None:
        if isinstance(room, bool) or not isinstance(room, int) or room < 1:
            raise GeometryError(f"room should be a positive number of tokens, not {room!r}")
        if cache.stands:
            raise KVPactError(
                "layers of this model hold more than compressed K and V (windows, states, an "
                "index), whose steps no graph of kvpact has: call the model"
            )
        if not installed():
            raise BackendUnavailable("steps of a graph need Triton: pip install 'kvpact[triton]'")
        self.model, self.cache, self.room = model, cache, room
        self.replays = self.captures = 0
        self._replay: Callable[[], None] | None = None
        self._known: list[Held] = []
        self._left = 0
        self._placed: list[tuple[TritonStep, int]] = []
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        self._ids = self._positions = self._padding = self._logits = nothing

    def __call__(self, ids: Tensor) -> Tensor:
        """Run one token of each row through the model.

        Parameters
        ----------
        ids : Tensor
            `[B, 1]`.

        Returns
        -------
        Tensor
            Logits `[B, 1, vocabulary]`; the next step may overwrite them.

        Raises
        ------
        BackendUnavailable
            As of `DecodeGraph`.
        KVPactError
            What any call of the model over the cache raises.
        """
        if ids.dim() != 2 or ids.shape[1] != 1:
            raise GeometryError(f"a step takes one token of each row, not {tuple(ids.shape)}")
        layers = self._layers()
        rows = layers[0].streams()[0].memory.tensor.shape[0]
        if ids.shape[0] != rows:
            raise GeometryError(f"{ids.shape[0]} rows, but the cache holds {rows}")
        with torch.no_grad():
            if not self._stands(layers):
                self._padding = _padding(layers[0], ids)
                if any(map(_early, layers)):
                    return self._as_ever(ids)
                self._begin(layers, ids)
            after = [counted(layer, 1) for layer in layers]
            if None in after:
                logits = self._as_ever(ids)
                self._follow(layers)
            else:
                if self._replay is None:
                    self._capture(layers, ids)
                log, held = self.cache._shared.call_log, layers[0].length
                if log.seen >= held > 0:
                    log.note(held, 1, ids if rows == 1 else None, device=ids.device)
                logits = self._replayed(layers, after, ids)
        self._known, self._left = [layer._held for layer in layers], self._left - 1
        return logits

    def _layers(self) -> list[CacheLayer]:
        held = self.cache.held()
        if held is None:
            raise GeometryError("the cache is empty; run the model on a prompt first")
        if self.cache._shared.gaps.ranges:
            raise GeometryError(
                "the cache has dropped tokens: graphs don't know of their positions"
            )
        return [held.entry(layer) for layer in range(held.geometry.num_layers)]

    def _stands(self, layers: list[CacheLayer]) -> bool:
        """Return whether there is room, and the layers are as the last step left them."""
        same = len(self._known) == len(layers) and self._left > 0
        pairs = zip(layers, self._known, strict=False)
        same = same and all(layer._held is held for layer, held in pairs)
        return same and (self._replay is None or self._placed == _placed(layers))

    def _begin(self, layers: list[CacheLayer], ids: Tensor) -> None:
        """Make room, and let every layer choose its step; held tokens stay as they are."""
        held = self.cache.held()
        assert held is not None
        held.reserve(self.room)
        self._replay, self._left = None, self.room
        for _ in range(_WARM):
            before = [layer._held for layer in layers]
            try:
                self._as_ever(ids)
            finally:
                for layer, then in zip(layers, before, strict=True):
                    runner = layer._held.runner
                    good = then.good if runner is None else runner.good
                    rewind(layer, then._replace(runner=runner, good=good))
        devices = {stream.memory.tensor.device for layer in layers for stream in layer.streams()}
        if devices != {ids.device}:
            raise BackendUnavailable(
                f"a graph is of one device; the cache is on {sorted(map(str, devices))}, and the "
                f"token ids on {ids.device}; call the model itself"
            )
        for index, layer in enumerate(layers):
            if not _runners([layer]):
                plan = layer._held.plan
                raise BackendUnavailable(
                    f"layer {index} ({layer.spec}) can't be stepped by the device alone: it needs "
                    f"the triton backend with check='deferred', and runs with {plan}; call the "
                    "model itself"
                )

    def _as_ever(self, ids: Tensor) -> Tensor:
        return self._forward(ids, self._layers()[0].length - self._padding)

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        given = {"position_ids": positions, "use_cache": True, **named(self.cache)}
        logits: Tensor = self.model(ids, **given).logits
        return logits

    def _capture(self, layers: list[CacheLayer], ids: Tensor) -> None:
        """Capture a step, and leave the layers as they were."""
        self._ids, self._positions = ids.clone(), layers[0].length - self._padding
        before = [layer._held for layer in layers]
        runners = _runners(layers)

        def step() -> None:
            for runner in runners:
                runner.frozen = True
            try:
                self._logits = self._forward(self._ids, self._positions)
            finally:
                for runner in runners:
                    runner.frozen = False
                for layer, then in zip(layers, before, strict=True):
                    layer._held = then

        # Nothing may be loaded or sent for the first time during a capture.
        _place(layers)
        step()
        for layer, runner, then in zip(layers, runners, before, strict=True):
            rewind(layer, then)
            runner.forget()
        _place(layers)
        self._replay = _captured(step, ids.device)
        self.captures += 1
        self._placed = _placed(layers)

    def _follow(self, layers: list[CacheLayer]) -> None:
        """Send where a step that packed left exact tokens; a graph of before knows other places."""
        if len(_runners(layers)) == len(layers):
            _place(layers)
            if self._placed != _placed(layers):
                self._replay = None

    def _replayed(self, layers: list[CacheLayer], after: list[Held | None], ids: Tensor) -> Tensor:
        assert self._replay is not None
        self._ids.copy_(ids)
        torch.sub(layers[0].length, self._padding, out=self._positions)
        self._replay()
        for layer, runner, held in zip(layers, _runners(layers), after, strict=True):
            assert held is not None
            layer._held = held
            runner.count(1)
        self.replays += 1
        return self._logits


def _captured(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Return the replay of a step: a graph, or the step itself where kernels are interpreted."""
    if device.type != "cuda":
        return step
    new_stream: Any = torch.cuda.Stream
    graph, stream = torch.cuda.CUDAGraph(), new_stream(device)
    try:
        with (
            torch.cuda.device(device),
            torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
        ):
            step()
    except RuntimeError as error:
        raise BackendUnavailable(
            f"the model's step can't be captured as a graph ({error}); call the model itself"
        ) from error
    return graph.replay


def _padding(layer: CacheLayer, ids: Tensor) -> Tensor:
    """Return how many padding tokens each row has, `[B, 1]` on the device of `ids`."""
    found = torch.zeros(ids.shape, dtype=torch.int64, device=ids.device)
    return found if layer.padding is None else found + layer.padding.to(ids.device).view(-1, 1)


def _early(layer: CacheLayer) -> bool:
    """Return whether sink tokens are still to come, or tokens from which a codec learns."""
    ends = (stream.sink_positions(layer.padding)[1] for stream in layer.streams())
    ready = all(stream.codec.ready for stream in layer.streams())
    return not ready or any(end > layer.length for end in ends)


def _place(layers: list[CacheLayer]) -> None:
    """Send where the layers' tokens lie, unless the device has it."""
    for layer, runner in zip(layers, _runners(layers), strict=True):
        k, v = layer.streams()
        runner.place(layer.length, (k.tail_start, k.memory), (v.tail_start, v.memory))


def _placed(layers: list[CacheLayer]) -> list[tuple[TritonStep, int]]:
    """Return the runners of the layers' steps, and how often each was sent tokens' places."""
    return [(runner, runner.placed) for runner in _runners(layers)]


def _runners(layers: list[CacheLayer]) -> list[TritonStep]:
    from kvpact.kernels.triton.step.step import TritonStep

    held = [layer._held.runner for layer in layers]
    return [runner for runner in held if isinstance(runner, TritonStep)]
