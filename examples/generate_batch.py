"""transformers' own continuous batching on exact pages and on compressed ones, of equal memory.

Eight prompts begin alike: the pages of what they share are computed and held once.

    python examples/generate_batch.py --spec turboquant:bits=4,sinks=0
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

from transformers.generation import ContinuousBatchingConfig

from kvpact.data import book_path
from kvpact.integrations.models import load_model
from kvpact.integrations.transformers import enable


def prompts_of(tokenizer: Any, count: int = 8) -> list[list[int]]:
    """Return prompts whose first 1,200 characters are the same."""
    book = book_path().read_text("utf-8")
    places = range(3000, 3000 * (count + 1), 3000)
    return [tokenizer(book[:1200] + book[i : i + 40 + i // 100]).input_ids for i in places]


def generate(
    model: Any, prompts: list[list[int]], new_tokens: int, blocks: int, page_size: int
) -> tuple[list[list[int]], int]:
    """Return the new tokens of each prompt, and how many tokens its pool has room for."""
    memory = ContinuousBatchingConfig(
        num_blocks=blocks, max_batch_tokens=256, page_size=page_size, allow_block_sharing=True
    )
    options = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": -1}
    answers = model.generate_batch(
        prompts, continuous_batching_config=memory, persistent_manager=True, **options
    )
    room = model._cached_continuous_batching_manager.batch_processor.cache.max_tokens_read
    model.destroy_cached_continuous_batching_manager()
    return [answer.generated_tokens for answer in answers.values()], room


def compare(
    model: Any, prompts: list[list[int]], spec: str, new_tokens: int, blocks: int, page_size: int
) -> dict[str, Any]:
    """Return rows of a table: the tokens and the room of both."""
    shape = new_tokens, blocks, page_size
    plain, room = generate(model, prompts, *shape)
    with enable(model, "none"):
        exact, _ = generate(model, prompts, *shape)
    with enable(model, spec) as enabled:
        packed, packed_room = generate(model, prompts, *shape)
        told = enabled.stats()
    pairs = [ab for xy in zip(plain, packed, strict=True) for ab in zip(*xy, strict=True)]
    return {
        "tokens with 'none'": "equal" if exact == plain else "DIFFERENT",
        f"with {spec}": f"{sum(a == b for a, b in pairs)} of {len(pairs)} equal",
        "room, plain": room,
        "room, compressed": packed_room,
        "most bytes held": told["most_bytes"],
        "of the same, exact": told["exact_bytes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spec", default="turboquant:bits=4,sinks=0")
    parser.add_argument("--blocks", type=int, default=16, help="memory, as so many exact pages")
    parser.add_argument("--new-tokens", type=int, default=16, help="for every prompt")
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args()
    logging.getLogger("ContinuousBatchingLogger").setLevel("ERROR")  # managers are kept on purpose
    model, tokenizer = load_model(options.model)
    prompts = prompts_of(tokenizer)
    rows = compare(model, prompts, options.spec, options.new_tokens, options.blocks, 128)
    for name, value in rows.items():
        print(f"{name:36}{value:>12}")


if __name__ == "__main__":
    main()
