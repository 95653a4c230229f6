"""``kvpact chat``: a conversation with a model on one compressed cache."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import typer

from kvpact.cli import inputs, options
from kvpact.cli.console import note, print_document, size_text
from kvpact.cli.generate import TextStream, exact_size, sampling_of

if TYPE_CHECKING:
    from torch import Tensor

ANSWER = "kvpact-answer"
_ENDS = "/exit", "/quit", "/bye"


def chat(
    model: str = options.MODEL_ARGUMENT,
    spec: str | None = options.SPEC,
    budget: str | None = options.BUDGET,
    max_new_tokens: int = typer.Option(512, min=1, help="Maximum number of tokens of an answer."),
    temperature: float = options.TEMPERATURE,
    seed: int = options.SAMPLING_SEED,
    dtype: str = options.DTYPE,
    threads: int | None = options.THREADS,
    as_json: bool = options.JSON,
) -> None:
    """Chat with a model on one compressed cache; prints its bytes after each answer.

    Each line of stdin, or of a pipe, gets an answer; /exit or Ctrl-D ends the chat.
    """
    from kvpact.evaluate import compressed_cache

    candidate = inputs.candidate_of(spec, budget=budget)
    network, tokenizer = inputs.open_model(model, dtype, threads)
    cache = compressed_cache(network, candidate)
    ends, sampling = network.generation_config.eos_token_id, sampling_of(temperature, None, seed)
    ids: Any = None
    turns: list[dict[str, Any]] = []
    for line in _lines():
        ids = _asked(tokenizer, line, ids)
        inputs.check_positions(network, ids.shape[1], max_new_tokens, "start a new chat")
        stream = TextStream(tokenizer, as_json)
        ids = inputs.continued(network, ids, cache, max_new_tokens, streamer=stream, **sampling)
        ended = int(ids[0, -1]) in (ends if isinstance(ends, list) else [ends])
        ids = ids[:, :-1] if ended else ids  # the template writes it, and the last is not cached
        held, stats = cache.memory_usage(), cache.stats()
        exact = exact_size(stats, network.dtype)
        sizes = {"tokens": ids.shape[1], "bytes": held, "exact_bytes": exact}
        turns.append({"prompt": line, "text": stream.text(), **sizes})
        note(
            f"[{ids.shape[1]:,} tokens{'' if ended else ', cut by --max-new-tokens'}: "
            f"{size_text(held)}, {100 * held / exact:.0f} % of an exact cache's "
            f"{size_text(exact)} in {str(network.dtype)[6:]}"
            f"{', all still exact' if stats['slot_bits_per_value'] is None else ''}]"
        )
    if as_json:
        print_document("chat", spec=candidate.label, turns=turns)


def _lines() -> Iterator[str]:
    """Yield the user's lines; a terminal is prompted for them."""
    with suppress(EOFError):
        while (line := input("> " if sys.stdin.isatty() else "").strip()) not in _ENDS:
            if re.fullmatch(r"/\w+", line):
                note(f"{line} is not known, and was not said; /exit or Ctrl-D ends the chat")
            elif line:
                yield line


def _asked(tokenizer: Any, line: str, ids: Tensor | None) -> Tensor:
    """Return the ids ``[1, T]`` of a chat so far, as the cache holds them, and of a line."""
    import torch

    if ids is None:
        return inputs.encode(tokenizer, line, chat=True)
    words = (("user", "Hello"), ("assistant", ANSWER), ("user", line))
    said = [{"role": role, "content": text} for role, text in words]
    text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    more = tokenizer(text.partition(ANSWER)[2], add_special_tokens=False)["input_ids"]
    return torch.cat([ids, ids.new_tensor([more])], dim=1)
