"""The calls that engines make of a cache that computes attention itself."""

from __future__ import annotations

from typing import Any, Protocol, Self, runtime_checkable

from torch import Tensor

from kvpact.cache.layer.stored import Step
from kvpact.contract import AttendConfig, CompressedKVCache
from kvpact.snapshot import Snapshot


@runtime_checkable
class EngineCache(CompressedKVCache, Protocol):
    """A `CompressedKVCache` that attends over its packed slots, rolls back, forks and is saved.

    `kvpact.create_cache` returns such a cache (on pages without `store`). Parameters, errors,
    threads and what holds after a failure are those of `CompressedKVCache`.

    Notes
    -----
    New tokens are attended as they were given, by themselves and by the other tokens of the same
    call; earlier tokens are attended as they are stored. `AttendConfig.exact_new=False` attends
    to the new tokens as stored, too.
    """

    def attend(
        self, layer: int, *, k: Tensor, v: Tensor, q: Tensor, config: AttendConfig | None = None
    ) -> Tensor:
        """Store new tokens and attend over all tokens, for any number of queries.

        Parameters
        ----------
        layer, k, v
            As in `CompressedKVCache.prefill`; tensors are given by their names alone.
        q : Tensor
            `[B, H_q, new, D]`, the queries of the new tokens; H_q is a multiple of H_kv.
        config : AttendConfig, optional
            Scale, softcap, window, masks, padding.

        Returns
        -------
        Tensor
            `[B, H_q, new, D_v]` in the dtype of `q`. A query that may see no token gets zeros.

        Raises
        ------
        KVPactError
            As `CompressedKVCache.prefill`; `GeometryError` also for masks and sink logits that do
            not fit, `DtypeError` for a mask of integers.
        """
        ...

    def store(
        self,
        layer: int,
        *,
        k: Tensor,
        v: Tensor,
        config: AttendConfig | None = None,
        q: Tensor | None = None,
    ) -> Step:
        """Store new tokens; return a `Step` that attends over them and the earlier tokens.

        For engines that hand over K and V before the queries.

        Parameters
        ----------
        layer, k, v
            As in `CompressedKVCache.prefill`.
        config : AttendConfig, optional
            Only `padding` and `exact_new` matter here.
        q : Tensor, optional
            Is checked like that of `attend`, before anything is stored.

        Returns
        -------
        Step
            `Step.attend(q, config)` gives what `attend` would have given. It raises `StaleResult`
            once the layer was rolled back, reordered or reset.
        """
        ...

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on, in all layers; a shorter layer stays as it is.

        Raises
        ------
        GeometryError
            `length` is not a number from 0 on.
        """
        ...

    def fork(self) -> Self:
        """Return an independent copy; memory may be shared until one of the two writes to it."""
        ...

    def select(self, indices: Tensor) -> None:
        """Keep the rows `indices` (`[N]` integers), in this order; rows may repeat.

        Raises
        ------
        GeometryError
            Not a 1-D tensor of integers, empty, or a row that is not there.
        """
        ...

    def reorder(self, indices: Tensor) -> None:
        """Rearrange the rows (beam search): `select` with as many rows as the cache holds."""
        ...

    def repeat(self, repeats: int) -> None:
        """Repeat every row `repeats` times, the copies next to each other."""
        ...

    def stats(self) -> dict[str, Any]:
        """Return what the cache holds.

        Returns
        -------
        dict
            At least ``tokens`` (of the longest layer), ``values`` (numbers of K and V cached),
            ``bytes`` (a mapping of parts, which add up to its ``total``, to bytes) and
            ``bits_per_value`` (None while nothing is held).
        """
        ...

    def snapshot(self, *, token_ids: Tensor | None = None) -> Snapshot:
        """Return what the cache holds, as one checked file that any cache of its spec restores.

        Parameters
        ----------
        token_ids : Tensor, optional
            `[T]` or `[B, T]` integers, stored with it.
        """
        ...

    def restore(self, snapshot: Snapshot) -> None:
        """Hold what a snapshot holds, in place of what is held now; continue byte for byte.

        Raises
        ------
        GeometryError, SpecError, DtypeError
            The snapshot is of another geometry, spec or dtype.
        FormatError, IntegrityError
            The snapshot is damaged, of another version, or a part.
        CacheFull
            It holds more tokens than the cache may.
        """
        ...
