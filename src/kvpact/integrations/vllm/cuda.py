"""vLLM's side on a GPU: what differs from its CPU worker.

vLLM chooses among many attention backends there, by a list of its own. kvpact takes the places of
all that a decoder may be given, and refuses what it does not cover: else vLLM would go on along its
list, and store no slots without a word.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from kvpact.errors import NonFiniteError
from kvpact.integrations.vllm.backend import KVPactBackend, KVPactBuilder, KVPactImpl, flag
from kvpact.integrations.vllm.refused import refuse


class CudaBackend(KVPactBackend):
    """Takes the place of whatever vLLM would choose for a decoder's attention."""

    @staticmethod
    def get_name() -> str:
        """Return the name that vLLM has for others' backends: no other's peculiarities."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[KVPactImpl]:
        """Return what computes; it refuses sliding windows."""
        return KVPactImpl

    @staticmethod
    def get_builder_cls() -> type[CudaBuilder]:
        """Return what tells it of a batch."""
        return CudaBuilder

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Refuse connectors: none has moved a device's pages."""
        return False

    @classmethod
    def validate_configuration(cls, *given: Any, **named: Any) -> list[str]:
        """Return no reason against it; refuse where there are some."""
        if reasons := super().validate_configuration(*given, **named):
            refuse(f"this model on a GPU ({'; '.join(reasons)})")
        return []


class CudaBuilder(KVPactBuilder):
    """Tells attention which sequences a batch is made of.

    A batch's pages are read from the device, once for all layers: vLLM keeps no copy of them on the
    host that it hands over. So a step is not the same launches each time, and no CUDA graph holds
    attention; vLLM captures what lies between two attentions.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    # Single tokens come first in a batch, side by side: they are taken without a copy.
    reorder_batch_threshold: int | None = 1

    def _read(self, batch: CommonAttentionMetadata, size: int) -> tuple[list[int], Tensor]:
        """Return the tokens of each sequence, and the pages of all, where the host can read.

        Raises
        ------
        NonFiniteError
            An earlier batch had tokens that the method can't hold.
        """
        # Exact as long as nobody speculates, which is refused.
        on_host = batch.seq_lens_cpu_upper_bound
        read = batch.seq_lens if on_host is None else on_host
        lengths: list[int] = read[: batch.num_reqs].tolist()
        most = -(-max(lengths, default=0) // size)
        tables: Tensor = batch.block_table_tensor[: batch.num_reqs, :most].cpu()
        good = flag(self.device.type)
        if good is not None and not bool(good):
            raise NonFiniteError(
                "K or V of an earlier step hold NaN, infinity or numbers beyond the range of the "
                "method; answers since then are wrong"
            )
        return lengths, tables
