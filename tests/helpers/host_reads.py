"""Counts what would make the host wait for a GPU."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "unique")


class HostReads(TorchDispatchMode):
    """Counts operations that read device data, by name: copies and an index of booleans, too."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name.strip("_") in {read.strip("_") for read in READS}:
            self.counts[name] += 1
        if name in ("index", "index_put", "index_put_") and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        ):
            self.counts[f"{name} of booleans"] += 1
        found = func(*args, **(kwargs or {}))
        if name in ("_to_copy", "copy_") and isinstance(found, torch.Tensor):
            source = args[1] if name == "copy_" else args[0]
            if source.device != found.device:
                self.counts["copy between devices"] += 1
        return found
