"""``kvpact chat``: a conversation with a model on one compressed cache."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvpact.cli import inputs, options
from kvpact.cli.console import count_text, note, print_document, size_text
from kvpact.cli.generate import TextStream, exact_size, sampling_of

if TYPE_CHECKING:
    from torch import Tensor

END, ANSWER = "/exit", "kvpact-answer"


def chat(
    model: str = options.CHAT_MODEL,
    spec: str = options.SPEC,
    sliding: str | None = options.SLIDING,
    budget: str | None = options.BUDGET,
    max_new_tokens: int = typer.Option(512, min=1, help="Maximum number of tokens of an answer."),
    temperature: float = options.TEMPERATURE,
    top_p: float | None = options.TOP_P,
    seed: int = options.SAMPLING_SEED,
    calibration: Path | None = options.CALIBRATION,
    dtype: str = options.DTYPE,
    threads: int | None = options.THREADS,
    as_json: bool = options.JSON,
) -> None:
    """Chat with a model on one compressed cache; prints its bytes after each answer.

    Each line of stdin, or of a pipe, gets an answer; /exit or Ctrl-D ends the chat.
    """
    import torch

    from kvpact.evaluate import compressed_cache

    candidate = inputs.candidate_of(spec, sliding, budget)
    network, tokenizer = inputs.open_model(model, dtype, threads)
    inputs.check_template(tokenizer, "kvpact generate continues a text")
    known = inputs.load_calibration(calibration, network)
    cache = compressed_cache(network, replace(candidate, calibration=known))
    sampling = sampling_of(temperature, top_p, seed)
    ids, turns, dtype_name = torch.zeros(1, 0, dtype=torch.long), [], str(network.dtype)[6:]
    for line in _lines():
        ids = torch.cat([ids, _turn(tokenizer, line, first=not turns)], 1)
        remedy = "start a new chat or lower --max-new-tokens"
        inputs.check_positions(network, ids.shape[1], max_new_tokens, remedy)
        stream = TextStream(tokenizer, as_json)
        ids = inputs.continued(network, ids, cache, max_new_tokens, streamer=stream, **sampling)
        ids, ended = _without_end(ids.cpu(), network.generation_config.eos_token_id)
        stats, held = cache.stats(), cache.memory_usage()
        exact = exact_size(stats, network.dtype)
        sizes = {"tokens": ids.shape[1], "bytes": held, "exact_bytes": exact}
        turns.append({"prompt": line, "text": stream.text(), **sizes})
        words = "" if ended else "; cut by --max-new-tokens"
        if candidate.source != "none" and isnan(stats["slot_bits_per_value"]):
            words += "; all still exact: sinks and window"
        note(
            f"[{count_text(ids.shape[1])}: {size_text(held)}, {100 * held / exact:.0f} % of the "
            f"{size_text(exact)} of an exact cache in {dtype_name}{words}]"
        )
    if as_json:
        print_document("chat", spec=candidate.label, turns=turns)


def _lines() -> Iterator[str]:
    """Yield what is said, line by line; a terminal is asked for it."""
    asked = "> " if sys.stdin.isatty() else ""
    if asked:
        with suppress(ImportError):  # it makes arrow keys work, and Windows has none
            import_module("readline")
    while True:
        try:
            line = input(asked).strip()
        except EOFError:
            return
        if line == END:
            return
        if line:
            yield line


def _turn(tokenizer: Any, line: str, *, first: bool) -> Tensor:
    """Return the ids ``[1, T]`` of a line in the template, behind an answer unless `first`.

    What the cache holds of an answer are the tokens that were generated, whatever the template
    makes of earlier answers: so of a made-up conversation, what follows the answer is taken.
    """
    if first:
        return inputs.encode(tokenizer, line, chat=True)
    words = {"user": "Hello", "assistant": ANSWER}
    said = [{"role": role, "content": text} for role, text in (*words.items(), ("user", line))]
    text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    rest = text.partition(ANSWER)[2]
    ids: Tensor = tokenizer(rest, return_tensors="pt", add_special_tokens=False)["input_ids"]
    return ids


def _without_end(ids: Tensor, ends: int | list[int] | None) -> tuple[Tensor, bool]:
    """Return ids without an end of the text, which the template writes, and whether it was there.

    The cache does not hold the last token: it was not fed.
    """
    ended = int(ids[0, -1]) in (ends if isinstance(ends, list) else [ends])
    return (ids[:, :-1] if ended else ids), ended
