"""New tokens of a layer with packed pages, handed from a pool's `update` to attention."""

from collections.abc import Sequence

from torch import Tensor
from transformers.utils import logging

from kvpact.contract import AttendConfig
from kvpact.errors import NonFiniteError
from kvpact.integrations.pages.layer import PagedLayer
from kvpact.integrations.pages.window import Row

logger = logging.get_logger(__name__)


class PagedTokens:
    """A batch's new K and V, `[tokens, heads, D]`, stored when used; `count`: tokens of all."""

    fresh = False

    def __init__(
        self, layer: PagedLayer, rows: Sequence[Row], k: Tensor, v: Tensor, count: int
    ) -> None:
        self.layer, self._rows, self._k, self._v, self.count = layer, rows, k, v, count
        self._whole: dict[str, Tensor] | None = None

    def attend(self, query: Tensor, config: AttendConfig) -> Tensor:
        """Attend with `[1, H_q, tokens, D]` over the pages; nothing is decompressed as a whole."""
        q = query[0].transpose(0, 1)
        out = q.new_zeros(*q.shape[:2], self._v.shape[2])
        self._tell(self.layer.step(self._rows, q, self._k, self._v, out, config))
        return out.transpose(0, 1).unsqueeze(0)

    def part(self, side: str) -> Tensor:
        """Return ``k`` or ``v`` of all rows, one after another, `[1, H, count, D]`."""
        if self._whole is None:
            k, v, cut = self.layer.read(self._rows, self._k, self._v, self.count)
            self._whole = {n: x.transpose(0, 1).unsqueeze(0) for n, x in (("k", k), ("v", v))}
            self._tell(cut)
        return self._whole[side]

    def _tell(self, cut: dict[int, NonFiniteError]) -> None:
        if cut:
            logger.error(
                "kvpact could not store a token of %d requests: %s. They get NaN from there on, as "
                "from a cache that holds it; others are not touched",
                len(cut),
                next(iter(cut.values())),
            )
