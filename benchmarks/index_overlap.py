"""What packing the keys of an index changes: which tokens are chosen, and how much of their score.

    python benchmarks/index_overlap.py [--tokens 1408] [--share 16]

No small model that is free to load has an index, so a stand-in's numbers are real ones: keys and
queries of Gemma 3 270M's layers with full attention, from a book. A query's score for a token is
the sum of its heads' products that are positive, as DeepSeek V3.2's; of all tokens before it, one
in --share is chosen. Keys are stored as `kvpact.quantizers.channels` does, none exact,
and scanned as they lie.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvpact.data import book_path
from kvpact.evaluate.feed import first_tokens
from kvpact.integrations.models import load_model
from kvpact.kernels import index_scores
from kvpact.quantizers.channels import to_integers


def keys_and_queries(model: Any, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return K `[T, D]` and the queries `[H, T, D]` of each layer with full attention."""
    found = []

    def attend(module: Any, query: Tensor, key: Tensor, *given: Any, **more: Any) -> Any:
        if not getattr(module, "is_sliding", False):
            found.append((key[0, 0].float(), query[0].float()))
        return sdpa_attention_forward(module, query, key, *given, **more)

    AttentionInterface.register("watched", attend)
    AttentionMaskInterface.register("watched", sdpa_mask)
    model.set_attn_implementation("watched")
    with torch.no_grad():
        model(ids)
    return found


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1408)
    parser.add_argument("--share", type=int, default=16)
    options = parser.parse_args()
    model, tokenizer = load_model("gemma3")
    ids = first_tokens(tokenizer, book_path().read_text("utf-8"), options.tokens).view(1, -1)
    print(f"{'layer':>6}{'same tokens':>14}{'score lost':>13}")
    for number, (keys, queries) in enumerate(keys_and_queries(model, ids)):
        packed, weight = to_integers(keys[None], 1, 0), torch.ones(1, 1, len(queries))
        same, lost = [], []
        for place in range(options.tokens // 2, options.tokens, 8):
            query, count = queries[:, place], (place + 1) // options.share
            scan = index_scores(*packed, query[None, None], weight)[0, 0]
            scores = (query @ keys[: place + 1].mT).relu().sum(0), scan[: place + 1]
            exact, rounded = (x.topk(count).indices for x in scores)
            same.append(len(set(exact.tolist()) & set(rounded.tolist())) / count)
            lost.append(1 - (scores[0][rounded].sum() / scores[0][exact].sum()).item())
        means = sum(same) / len(same), sum(lost) / len(lost)
        print(f"{number:>6}{means[0]:>14.4f}{means[1]:>13.1e}")


if __name__ == "__main__":
    main()
