"""`PrefixCache`: the longest known prefix of a prompt, out of a store and into a cache."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch

from kvpact.cache import ContiguousCache, PagedKVCache, PagedView
from kvpact.cache.layer.layer import CacheLayer
from kvpact.cache.layer.states import page_tokens
from kvpact.cache.paged.sharing import page_keys, seal
from kvpact.cache.stream.codecs import Calibration, layer_codecs
from kvpact.callable_package import tells_names
from kvpact.errors import (
    FormatError,
    GeometryError,
    IntegrityError,
    MismatchError,
    SpecError,
    StoreError,
)
from kvpact.kernels import giving_back
from kvpact.methods import Codec
from kvpact.methods.fitted import FittedCodec
from kvpact.prefixes.checkpoints import CheckpointKind
from kvpact.prefixes.chunks import ChunkKind, Prefix
from kvpact.prefixes.fetch import FETCHED, Gone, fetched, fetched_one, first_lacking
from kvpact.prefixes.ids import Tokens, runs, token_ids
from kvpact.prefixes.sources import PrefixSource, RecordSource, StoredSource, source_of
from kvpact.recipe import SpecLike
from kvpact.snapshot import Identity, RecordState
from kvpact.snapshot.tensors import same_tensors
from kvpact.stores import Store, StoreWarning
from kvpact.stores.base import Blob, check_store


@tells_names({}, "kvpact.integrations.transformers.prefix_cache(store, model, cache)")
class PrefixCache:
    """Prefixes in a store, in chunks of some tokens: one entry has all layers of one chunk.

    A chunk's key is a hash chain over the token ids up to its end, so that a prefix that is held
    once serves everything that extends it, and saving a longer chat writes the new chunks alone.
    The chain begins with whatever else makes bytes differ: specs with all options and versions,
    the version of the slots, geometry and dtype, what codecs have learnt, key offsets, model,
    adapter, tenant and chunk size. So entries of unlike kinds never meet, in one store or several.

    Entries hold packed slots as they lie in the cache (or as `storage` says), and the sink tokens.
    The window is not saved: a cache that took a prefix reads the prefix's last tokens as stored,
    until new tokens have come.

    Parameters
    ----------
    store : Store
        Where chunks lie, see `kvpact.stores.open_store`.
    cache : ContiguousCache, PagedKVCache, PagedView or PrefixSource
        What prefixes go into and come from. Its geometry has to name the dtype. A `MLACache` is a
        contiguous one; for transformers' models see `kvpact.integrations.transformers`.
    model : str
        A fingerprint of config and weights (`kvpact.integrations.fingerprint`), or any name that is
        never used for another model: under one name all K and V have to be the same.
    adapter, tenant : str, optional
        Other adapters have other K and V; tenants don't share.
    chunk : int, optional
        Tokens per entry, a multiple of 32 and of the methods' groups; the least one from 64 on if
        omitted.
    storage : str, Spec, path or mapping, optional
        Spec or recipe by which chunks are stored, such as ``pca:bits=1.5``, if not as they lie in
        the cache: tokens are compressed again where they are saved and where they are loaded. Keys
        depend on it, and no longer on the cache's own spec.
    calibration : Calibration or mapping, optional
        What methods of `storage` learnt (``kvpact calibrate``).
    windows : {"int8", "exact"}, optional
        How the windows of a model's other layers are stored: as 8-bit integers with a scale per
        channel over 64 tokens, or as they are. If omitted, exact where all specs are ``none``.
    device : torch.device
        Where a contiguous cache's tokens go.

    Raises
    ------
    GeometryError
        `chunk` cuts a tile or a group.
    DtypeError
        The cache's geometry has no dtype.
    SpecError
        A method that learns from tokens and has not learnt yet: make the cache with `calibration`.
        Or `windows` is something else.
    MismatchError
        `model` is empty.

    Examples
    --------
    >>> prefixes = PrefixCache(store, cache, model=fingerprint)
    >>> held = prefixes.load(token_ids[:-1])  # then compute token_ids[held:]
    >>> prefixes.save(token_ids)  # all that are held
    """

    def __init__(
        self,
        store: Store,
        cache: ContiguousCache | PagedKVCache | PagedView | PrefixSource,
        *,
        model: str,
        adapter: str | None = None,
        tenant: str | None = None,
        chunk: int | None = None,
        storage: SpecLike | None = None,
        calibration: Calibration | None = None,
        windows: str | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        check_store(store)
        if not model:
            raise MismatchError("name the model, by a fingerprint of its weights: K and V are its")
        self.store = store
        self.written = 0
        """Chunks that `save` wrote."""
        self._unreadable: set[str] = set()
        """Keys that the store affirms and gave nothing usable for: `save` writes them again."""
        self._known = 0  # chunks that the store had when `load` was called last
        self._source: PrefixSource = source_of(cache, device)
        self._records = self._source if isinstance(self._source, RecordSource) else None
        if storage is not None:
            self._source = StoredSource(self._source, storage, calibration)
        elif calibration is not None:
            raise SpecError(
                "calibration goes with storage; give the cache its own where it is made"
            )
        specs, geometry = self._source.specs, self._source.geometry
        self._kind = ChunkKind(
            tuple(specs),
            geometry,
            self._codecs(),
            Identity(model=model, adapter=adapter, tenant=tenant),
            page_tokens(specs, geometry, chunk, "chunk"),
            self._source.key_offsets,
        )
        if windows not in (None, "int8", "exact"):
            raise SpecError(f"windows should be 'int8' or 'exact', not {windows!r}")
        exact = all(codec.exact for pair in self._kind.codecs for codec in pair)
        packed = windows == "int8" or (windows is None and not exact)
        self._checkpoints: CheckpointKind | None = None
        if self._records is not None and self._records.shapes:
            self._checkpoints = CheckpointKind(self._kind, tuple(self._records.shapes), packed)

    def _codecs(self) -> tuple[tuple[Codec, Codec], ...]:
        source = self._source
        pairs = source.codecs() or layer_codecs(source.specs, source.geometry, None)
        for pair in pairs:
            for codec in pair:
                if isinstance(codec, FittedCodec):
                    codec.require_fitted()  # else every sequence learns something else
        return tuple(pairs)

    def rename(self, model: str) -> None:
        """Go on for a model of another fingerprint, whose prefixes have other keys."""
        self._kind = replace(self._kind, identity=replace(self._kind.identity, model=model))
        if self._checkpoints is not None:
            self._checkpoints = replace(self._checkpoints, chunks=self._kind)

    @property
    def chunk(self) -> int:
        """Tokens per entry."""
        return self._kind.size

    def keys(self, tokens: Tokens) -> list[str]:
        """Return the store's keys of all full chunks of a sequence."""
        return [key.hex() for key in page_keys(token_ids(tokens), self.chunk, self._kind.salt)]

    def match(self, tokens: Tokens) -> int:
        """Return how many of the first tokens the store holds; nothing is read.

        Of a model whose other layers hold windows and states, as many as have these, too.

        Parameters
        ----------
        tokens : sequence of int or Tensor
            Token ids, `[T]` or `[1, T]`, from the first on.
        """
        keys = self.keys(tokens)
        return self._checkpoint(keys, first_lacking(keys, self._lack)) * self.chunk

    def _checkpoint(self, keys: Sequence[str], last: int) -> int:
        """Return how many chunks there are, `last` at most, up to one with a checkpoint."""
        kind = self._checkpoints
        if kind is None:
            return last
        for end in range(last, 0, -FETCHED):
            lacks = self._lack([kind.key(key) for key in keys[max(end - FETCHED, 0) : end]])
            if False in lacks:
                return end - lacks[::-1].index(False)
        return 0

    def _lack(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether its entry is to be written."""
        held = self.store.contains_many(keys)
        return [key in self._unreadable or not x for key, x in zip(keys, held, strict=True)]

    @giving_back()
    def load(self, tokens: Tokens, *, seq: int | None = None) -> int:
        """Put the longest prefix that the store holds into an empty cache.

        A chunk that is damaged, gone, or that the store can't read (it is another secret's, say)
        shortens the prefix, with a `StoreWarning`. The next `save` of this object writes it again.

        Parameters
        ----------
        tokens : sequence of int or Tensor
            Token ids, `[T]` or `[1, T]`. Leave the last one out if its logits are wanted.
        seq : int, optional
            The sequence of a `PagedKVCache`, allocated and empty.

        Returns
        -------
        int
            Tokens that the cache holds now.

        Raises
        ------
        GeometryError
            The cache holds tokens already.
        CacheFull
            The cache has no room for the prefix; it is as before.
        """
        if any(layer.length for layer in self._source.layers(seq)):
            raise GeometryError("a prefix goes into an empty cache; reset this one first")
        ids = token_ids(tokens)
        keys = self.keys(ids)
        self._unreadable.difference_update(keys)  # another process may have written them since
        if self._checkpoints is not None:
            self._unreadable.difference_update(map(self._checkpoints.key, keys))
        self._known = first_lacking(keys, self._lack)
        keys = keys[: self._checkpoint(keys, self._known)]
        prefix, failed = Prefix(self._kind, len(keys)), dict[int, str]()
        for index, blob in fetched(self.store, keys):
            part = ids[index * self.chunk : (index + 1) * self.chunk]
            if blob is None:
                self._unreadable.add(keys[index])
                failed[index] = "it is gone"
                continue
            try:
                prefix.put(index, blob, part)
            except (FormatError, IntegrityError) as error:
                failed[index] = str(error)
        end = min(failed, default=len(keys))
        if end in failed:
            if keys[end] not in self._unreadable:
                self._drop([keys[end]])
            self._shorter(end, len(keys), failed[end])
        count, records = self._load_checkpoint(keys, ids, end)
        if count:
            try:
                self._source.restore(prefix.state(count, records), seq)
            except (FormatError, IntegrityError) as error:  # each is whole, all of them are not
                self._drop(keys[:count])
                self._shorter(0, len(keys), str(error))
                return 0
        return count * self.chunk

    def _load_checkpoint(
        self, keys: Sequence[str], ids: Sequence[int], last: int
    ) -> tuple[int, list[RecordState]]:
        """Return how many chunks, `last` at most, end in a checkpoint that can be read, and it."""
        kind = self._checkpoints
        if kind is None:
            return last, []

        def read(end: int) -> Blob:  # what `kind` finds damaged is taken for the last one
            key, last = kind.key(keys[end // self.chunk - 1]), end == count * self.chunk
            if (blob := fetched_one(self.store, key, verify=not last)) is None:
                raise Gone(key, end)
            return blob

        while count := self._checkpoint(keys, last):
            try:
                return count, kind.load(read, ids[: count * self.chunk])
            except (FormatError, IntegrityError, Gone) as error:
                if isinstance(error, Gone):  # perhaps the store can't read it now
                    self._unreadable |= {error.key, kind.key(keys[count - 1])}
                else:
                    self._drop([kind.key(keys[count - 1])])
                text = f"windows and states after token {count * self.chunk} can't be used"
                warnings.warn(
                    f"{text} ({error}): the prefix is shorter", StoreWarning, stacklevel=3
                )
        return 0, []

    def _drop(self, keys: Sequence[str]) -> None:
        """Remove entries that are damaged; where that fails, `save` replaces them."""
        self._unreadable.update(keys)
        try:
            for key in keys:
                self.store.delete(key)
        except StoreError as error:
            warnings.warn(f"damaged chunks stay: {error}", StoreWarning, stacklevel=3)

    def _shorter(self, index: int, count: int, why: str) -> None:
        message = f"chunk {index} of {count} can't be used ({why}): the prefix ends before it"
        warnings.warn(message, StoreWarning, stacklevel=3)

    @giving_back()
    def save(self, tokens: Tokens, *, seq: int | None = None) -> int:
        """Store those chunks of what the cache holds that the store has not yet.

        Chunks that the last `load` could not read count as missing, and are replaced.

        Chunks are saved as they lie. Where a rollback reached past the window into a packed
        group, its later tokens were coded with the scales of those rejected: what is saved, and
        shared from then on, is less exact there than a fresh prefill's. Methods that code each
        token alone have no such groups; else let the window be wider than what is rolled back.

        Parameters
        ----------
        tokens : sequence of int or Tensor
            The ids of the whole text, `[T]` or `[1, T]`: of all tokens held, and one more at most,
            as generation's last token is not in the cache yet. What is no full chunk stays unsaved.
        seq : int, optional
            The sequence of a `PagedKVCache`.

        Returns
        -------
        int
            Chunks written.

        Raises
        ------
        GeometryError
            The ids are not of the tokens held: there are fewer, or more than one too many. Or the
            cache has several rows, or padding.
        MismatchError
            The cache was restored from a snapshot whose codecs had learnt something else.
        StoreError
            The store could not write.
        """
        ids, layers = token_ids(tokens), self._source.layers(seq)
        self._check(layers, ids)
        for layer in layers:
            seal(layer, len(ids) // self.chunk * self.chunk)
        packed = min((s.packed for layer in layers for s in layer.streams()), default=0)
        keys = self.keys(ids)[: packed // self.chunk]
        missing = [i for i, lacks in enumerate(self._lack(keys)) if lacks]
        for run in runs(missing):
            blobs = self._kind.pack(layers, run[0], run[-1] + 1, ids)
            for index, blob in zip(run, blobs, strict=True):
                self.store.put(keys[index], blob)
                self._unreadable.discard(keys[index])
                self.written += 1
        self._save_checkpoint(keys, ids, max((layer.length for layer in layers), default=0), seq)
        return len(missing)

    def _save_checkpoint(
        self, keys: Sequence[str], ids: Sequence[int], held: int, seq: int | None
    ) -> None:
        """Store the windows and states after the `held` tokens, if a chunk ends there."""
        kind, records = self._checkpoints, self._records
        if kind is None or records is None or not keys:
            return
        count = held // self.chunk
        if held % self.chunk:
            if not self._checkpoint(keys, len(keys)):
                text = (
                    f"the windows and states of this model stand at {held} tokens, where no chunk "
                    "of the prefix ends, so nothing of it can be loaded: prefill() stops where "
                    "they can be saved"
                )
                warnings.warn(text, StoreWarning, stacklevel=3)
        elif count <= len(keys) and self._lack([key := kind.key(keys[count - 1])])[0]:
            nearest = range(count - 1, kind.begins(held) // self.chunk, -1)
            lacks = self._lack([kind.key(keys[n - 1]) for n in nearest])
            begin = next((n * self.chunk for n, x in zip(nearest, lacks, strict=True) if not x), 0)
            self.store.put(key, kind.pack(records.records(seq), begin, ids[:held]))
            self._unreadable.discard(key)

    def _check(self, layers: Sequence[CacheLayer], ids: Sequence[int]) -> None:
        tokens = len(ids)
        held = min((layer.length for layer in layers), default=0)
        if held not in (tokens - 1, tokens):
            # More tokens than ids: something stands twice, and ids and slots don't belong together.
            raise GeometryError(
                f"{tokens} token ids, but the cache holds {held} tokens: give the ids of all of "
                "them, and at most the one that was generated last"
            )
        rows = {s.tail.shape[0] for layer in layers for s in layer.streams()}
        if rows - {1} or any(x.padding is not None and x.padding.any() for x in layers):
            raise GeometryError(
                "prefixes are of one row without padding; save rows of a batch one by one"
            )
        if any(s.offset and s.offset.origin is not None for x in layers for s in x.streams()):
            raise GeometryError("prefixes begin at position 0; this cache's tokens begin elsewhere")
        for layer, pair in zip(layers, self._kind.codecs, strict=False):
            for stream, codec in zip(layer.streams(), pair, strict=False):
                if not same_tensors(stream.codec.state(), codec.state()):
                    raise MismatchError(
                        "the cache holds tokens of codecs that learnt something else than its "
                        "calibration: their slots would not be understood"
                    )
