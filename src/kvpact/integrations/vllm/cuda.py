"""vLLM's side on a GPU, as far as it differs from the CPU worker."""

from typing import Any, ClassVar, NoReturn

from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backend import CommonAttentionMetadata as Batch

from kvpact.integrations.pages.damage import watch_of
from kvpact.integrations.vllm.backend import KVPactBackend, KVPactImpl, logger
from kvpact.integrations.vllm.builder import KVPactBuilder, KVPactMetadata
from kvpact.integrations.vllm.latents import OtherLatentBackend
from kvpact.integrations.vllm.setting import refuse


class CudaBuilder(KVPactBuilder):
    """The builder of batches for attention, which reads their pages from the device."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    # Single tokens come first in a batch, side by side: they are taken without a copy.
    reorder_batch_threshold: int | None = 1

    def build(
        self, common_prefix_len: int, common_attn_metadata: Batch, fast_build: bool = False
    ) -> KVPactMetadata:
        """Return the rows of a batch; report tokens of the last one that could not be stored."""
        watch = watch_of(self.device.type)
        made: KVPactMetadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if watch is None:
            return made
        if cut := watch.read():
            KVPactImpl.cut += len(cut)
            logger.error(
                "kvpact could not store tokens of the last step: K or V hold NaN, infinity or "
                "numbers beyond the range of the method. Their requests get NaN from here on, and "
                "so does who shares their pages; others are not touched. Requests cut so far: %d",
                KVPactImpl.cut,
            )
        watch.rows = self._rows
        return made

    def _read(self, batch: Batch, size: int) -> tuple[list[int], Tensor]:
        """Return the tokens of each sequence, and the pages of all, where the host can read."""
        # Exact as long as nobody speculates, which is refused.
        on_host = batch.seq_lens_cpu_upper_bound
        read = batch.seq_lens if on_host is None else on_host
        lengths: list[int] = read[: batch.num_reqs].tolist()
        most = -(-max(lengths, default=0) // size)
        return lengths, batch.block_table_tensor[: batch.num_reqs, :most].cpu()


class CudaBackend(KVPactBackend):
    """The replacement of whatever vLLM would choose for a decoder's attention."""

    name = "CUSTOM"  # vLLM's name of others' backends: no other's peculiarities
    impl = KVPactImpl  # refuses sliding windows
    builder = CudaBuilder

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


class OtherBackend(OtherLatentBackend):
    """A backend that refuses attention that is no plain decoder's, or is not known here."""

    @staticmethod
    def get_name() -> NoReturn:
        """Refuse."""
        refuse("this --attention-backend, or a model whose layers ask for one of their own")

    get_impl_cls = get_builder_cls = get_name
