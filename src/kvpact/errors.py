"""Every error that kvpact raises on purpose; each message says what to do.

`except KVPactError` catches them all, and the class of Python in brackets those of its line::

    KVPactError
    |- SpecError, GeometryError, DeviceError                     (ValueError)
    |- NonFiniteError, FormatError, MismatchError                (ValueError)
    |- DtypeError                                                (TypeError)
    |- LayerIndexError                                           (IndexError)
    |- SequenceError                                             (KeyError)
    |- IncompleteToken, StaleResult, CorruptState, KernelError   (RuntimeError)
    |- SnapshotError, EnableError, BackendUnavailable            (RuntimeError)
    |- RegistrationError, IntegrityError
    |- CacheFull
    |  `- BudgetExceeded
    `- StoreError
       |- StoreKeyError                                          (ValueError)
       `- StoreFull, StoreUnavailable
"""


class KVPactError(Exception):
    """Base class of all errors that kvpact raises."""


class SpecError(KVPactError, ValueError):
    """A spec string, a recipe or a method's option is not what it should be."""


class RegistrationError(KVPactError):
    """A method can't be registered: its name is taken or the class is no method."""


class GeometryError(KVPactError, ValueError):
    """A tensor's rank, shape, heads, width or batch differ from what the cache holds."""


class DtypeError(KVPactError, TypeError):
    """A tensor's dtype (or the type itself) can't be stored."""


class DeviceError(KVPactError, ValueError):
    """Tensors that belong together live on different devices."""


class NonFiniteError(KVPactError, ValueError):
    """NaN, infinity, or a magnitude that the method's fp16 side information can't hold."""


class LayerIndexError(KVPactError, IndexError):
    """A layer index outside of the cache's layers."""


class SequenceError(KVPactError, KeyError):
    """A sequence id that was never allocated, was freed, or is named twice in one call."""

    def __str__(self) -> str:
        """Return the message (a KeyError would quote it)."""
        return str(self.args[0]) if self.args else ""


class CacheFull(KVPactError):
    """No room for the tokens; the cache is as before."""


class BudgetExceeded(CacheFull):
    """No way to hold the tokens within the cache's budget of bytes; the cache is as before."""


class IncompleteToken(KVPactError, RuntimeError):
    """`KVCache.advance` before every layer had stored the token."""


class StaleResult(KVPactError, RuntimeError):
    """A lazy result was read after its cache had been rolled back, reordered or reset."""


class CorruptState(KVPactError, RuntimeError):
    """K and V of a layer do not belong together, so nothing can be computed from them."""


class KernelError(KVPactError, RuntimeError):
    """A native kernel refused its arguments: a defect of kvpact; the cache is as before."""


class FormatError(KVPactError, ValueError):
    """Stored bytes are not in a format that this version can read."""


class IntegrityError(KVPactError):
    """Stored bytes were changed: a checksum does not match."""


class MismatchError(KVPactError, ValueError):
    """A snapshot is of another model, adapter, tenant or learnt state than what it goes into."""


class StoreError(KVPactError):
    """A store can't do what was asked; the message names the store and the cause."""


class StoreKeyError(StoreError, ValueError):
    """A key that no store takes: empty, too long, or of other characters than a digest's."""


class StoreFull(StoreError):
    """No room for the entry, on disk or in the byte budget; what was stored is as before."""


class StoreUnavailable(StoreError):
    """The server of a store does not answer, or refuses the password."""


class SnapshotError(KVPactError, RuntimeError):
    """A cache holds something that a snapshot can't, or nothing yet."""


class EnableError(KVPactError, RuntimeError):
    """A model, or a call of its `generate`, can't use the cache that `enable` sets."""


class BackendUnavailable(KVPactError, RuntimeError):
    """A backend, an optional package or a model was asked for and is not there."""
