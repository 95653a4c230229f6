"""Snapshots with other specs: small ones to keep, as `pca`, and back into a cache's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from kvpact.cache.batch.contiguous import ContiguousCache
from kvpact.cache.checks import KeyOffsets, check_offsets, state_of
from kvpact.cache.layer.layer import CacheLayer
from kvpact.cache.layer.states import restored_layer
from kvpact.cache.modes import detached
from kvpact.cache.stream.codecs import Calibration, cache_specs, states_of
from kvpact.contract import AttendConfig
from kvpact.geometry import CacheGeometry
from kvpact.kernels import Compute
from kvpact.recipe import SpecLike
from kvpact.snapshot import Snapshot
from kvpact.snapshot.state import CacheState
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
    held, specs = state_of(snapshot), cache_specs(spec, snapshot.geometry)
    if key_offsets is None:
        pairs = enumerate(snapshot.layer(index, 0, 0).streams for index in range(len(specs)))
        key_offsets = {i: pair[0].offset for i, pair in pairs if pair and pair[0].offset}
    layers = layers_of(held, device)
    target = recoded(layers, specs, held.geometry, calibration, key_offsets, device)
    return target.snapshot_with(held.records, snapshot.token_ids, snapshot.manifest.identity)


def layers_of(held: CacheState, device: torch.device | str) -> Iterator[CacheLayer]:
    """Yield layers that hold a state, one after the other, each by its own spec."""
    compute = Compute()
    for index, state in enumerate(held.layers):
        given = {} if state.streams is None else {index: state.streams[0].offset}
        offsets = check_offsets({i: x for i, x in given.items() if x is not None}, held.geometry)
        spec, latent = Spec.from_json(state.spec), held.geometry.latent
        empty = CacheLayer(spec, latent=latent, compute=compute, offset=offsets.get(index))
        yield restored_layer(empty, state, torch.device(device), shared=False)


@detached
def recoded(
    layers: Iterable[CacheLayer],
    specs: list[Spec],
    geometry: CacheGeometry,
    calibration: Calibration | None,
    key_offsets: KeyOffsets,
    device: torch.device | str,
) -> ContiguousCache:
    """Return a cache of the tokens that layers hold, stored by other specs."""
    known = states_of(calibration, specs, geometry, device)
    target = ContiguousCache(specs, geometry, calibration=known, key_offsets=key_offsets)
    for index, layer in enumerate(layers):
        if layer.k is not None and layer.length:
            origin = layer.k.offset and layer.k.offset.origin
            rows = None if origin is None else torch.tensor(origin, dtype=torch.int64, device="cpu")
            config = AttendConfig(padding=layer.padding, origin=rows)
            target.store(index, k=layer.dequantize("k"), v=layer.dequantize("v"), config=config)
    return target
