"""The state of a cache as a file: checked, readable in slices, without pickle."""

from kvpact.callable_package import let_tell
from kvpact.snapshot.container import Container
from kvpact.snapshot.manifest import Manifest
from kvpact.snapshot.snapshot import Snapshot
from kvpact.snapshot.state import FieldInfo, Identity, LayerState, RecordState, StreamState
from kvpact.snapshot.tensors import token_hash

__all__ = [
    "Container",
    "FieldInfo",
    "Identity",
    "LayerState",
    "Manifest",
    "RecordState",
    "Snapshot",
    "StreamState",
    "token_hash",
]

let_tell(__name__)
