"""Snapshots with other specs: small ones to keep, as `pca`, and back into a cache's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpact.cache.checks import KeyOffsets
from kvpact.cache.codecs import Calibration, states_of
from kvpact.cache.contiguous import ContiguousCache
from kvpact.cache.modes import detached
from kvpact.cache.specs import cache_specs
from kvpact.contract import AttendConfig
from kvpact.errors import FormatError
from kvpact.key_offset import KeyOffset
from kvpact.recipe import SpecLike
from kvpact.snapshot import LayerState, Snapshot
from kvpact.spec import Spec


@detached
def recode(
    snapshot: Snapshot,
    spec: SpecLike | Sequence[Spec],
    *,
    calibration: Calibration | None = None,
    key_offsets: KeyOffsets | None = None,
    device: torch.device | str = "cpu",
) -> Snapshot:
    """Return a snapshot of the same tokens, stored by another spec.

    Tokens are decompressed and compressed again, so each such step adds its error; sinks and window
    stay exact where both specs have them. So a cache can be kept in few bits, and be restored with
    its own spec.

    Parameters
    ----------
    snapshot : Snapshot
        Of a whole cache, from whichever layout.
    spec : str, Spec, path, mapping or sequence of Spec
        A spec, a recipe with a spec per layer, or the specs of all layers.
    calibration : Calibration or mapping, optional
        For methods that learn (see `create_cache`); without it they learn from the tokens.
    key_offsets : mapping, optional
        Layer -> `KeyOffset` of the result; those of the snapshot if omitted, of which `pca` has
        none.
    device : torch.device
        Where to compute.

    Returns
    -------
    Snapshot
        With the token ids and the identity of the one given.

    Raises
    ------
    SpecError
        The spec is not known, or is not in the calibration.
    GeometryError
        Specs for another number of layers.
    FormatError, IntegrityError
        The snapshot is damaged, of another version, or a part.
    NonFiniteError
        A token is beyond what the spec's methods can hold.

    Examples
    --------
    >>> small = recode(cache.snapshot(), "pca:bits=1.5", calibration=calibration)
    >>> small.save("chat.kv")
    >>> cache.restore(recode(Snapshot.load("chat.kv"), "trellis:bits=4", key_offsets=offsets))
    """
    m = snapshot.manifest
    before = [Spec.from_json(layer.spec) for layer in m.layers]
    after = cache_specs(spec, m.geometry)
    states = [snapshot.layer(index) for index in range(len(before))]
    offsets = {i: offset for i, state in enumerate(states) if (offset := _offset(state))}
    source = ContiguousCache(before, m.geometry, key_offsets=offsets)
    source.restore(snapshot, device=device)
    kept = offsets if key_offsets is None else key_offsets
    known = states_of(calibration, after, m.geometry, device)
    target = ContiguousCache(after, m.geometry, calibration=known, key_offsets=kept)
    for index, state in enumerate(states):
        if state.streams is None:
            continue
        if state.streams[0].length != state.streams[1].length:
            raise FormatError(f"layer {index} holds unlike numbers of K and V")
        k, v = (source.dequantize(index, side) for side in ("k", "v"))
        target.store(index, k=k, v=v, config=_config(state))
    return target.snapshot(token_ids=snapshot.token_ids, identity=m.identity)


def _offset(state: LayerState) -> KeyOffset | None:
    return None if state.streams is None else state.streams[0].offset


def _config(state: LayerState) -> AttendConfig:
    assert state.streams is not None
    return AttendConfig(padding=_rows(state.padding), origin=_rows(state.streams[0].origin))


def _rows(numbers: tuple[int, ...] | None) -> Tensor | None:
    return None if numbers is None else torch.tensor(numbers, dtype=torch.int64, device="cpu")
