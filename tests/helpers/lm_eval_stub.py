"""What the documentation uses of lm_eval, which is not installed where tests run."""

import sys
from types import ModuleType

import torch


class HFLM:
    """As lm_eval 0.4.13 calls a decoder: once for likelihoods, and `generate` for texts."""

    def __init__(self, pretrained, batch_size=1):
        self.model, self.batch_size = pretrained, batch_size

    @torch.no_grad()
    def _model_call(self, inps, attn_mask=None, labels=None):
        return self.model(inps).logits

    def _model_generate(self, context, max_length, stop, **generation_kwargs):
        kwargs = {"max_length": max_length, "pad_token_id": 0, "use_cache": True}
        return self.model.generate(input_ids=context, **kwargs, **generation_kwargs)

    def loglikelihoods(self, inps):
        """Return each token's, but the first one's, as the harness takes them from logits."""
        scores = self._model_call(inps).float().log_softmax(-1)[:, :-1]
        return scores.gather(2, inps[:, 1:, None])[..., 0]


def stand_in(monkeypatch):
    """Let `from lm_eval.models.huggingface import HFLM` find the class above."""
    for name in ("lm_eval", "lm_eval.models", "lm_eval.models.huggingface"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["lm_eval.models.huggingface"].HFLM = HFLM
