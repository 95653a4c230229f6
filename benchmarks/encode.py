"""Encoding into slots and decoding, beside torch's: many tokens at once, and one token more.

    python benchmarks/encode.py [--specs SPEC …] [--tokens 4096] [--rounds 9] [--out DIR]

CPU time of one thread, which other work on the machine disturbs least. Many tokens: G values/s, K
and V of 8 heads, D = 128 and 64, fp32 in, random data; the native kernel, the torch body, and
torch's rotation alone as a matrix product take turns in each round. Decoding: K and V back in
fp32, the rotation undone. What no native kernel covers has torch's figure alone. One token:
microseconds of `store` for one layer's K and V (8 heads, D = 128), the whole path through Python,
on caches of 1k and of `--long` tokens, what `backend="auto"` chooses and torch in turns. Medians
and ratios in this run are printed, and written to DIR/encode.json and encode.md.
"""

import time

import runner
import torch

from kvpact import CacheGeometry, create_cache, parse_spec
from kvpact.cache.stream.segments import SegmentList
from kvpact.kernels import CHUNK, StreamView, choose
from kvpact.kernels.cpu import library
from kvpact.kernels.cpu.encode import CodecEncoder, CpuEncoder
from kvpact.methods.fitted import FittedCodec

SPECS = [
    "turboquant:bits=4", "turboquant:bits=3", "turboquant:bits=2", "turboquant:bits=4,center=64",
    "trellis:bits=4", "trellis:bits=3", "trellis:bits=2", "trellis:bits=4,states=8",
    "int:bits=8", "int:bits=4", "fp8", "kivi:bits=2", "kvarn:bits=4",
    "turboquant:bits=4,mode=prod", "qjl", "polarquant",
]  # fmt: skip
HEADS = 8


def rounds_of(calls: dict[str, runner.Call], rounds: int, warm: int = 0) -> dict[str, float]:
    """Return the median seconds of each call by the thread's clock; all take turns."""
    turns = {n: runner.turn_of(c, clock=time.thread_time, warm=warm) for n, c in calls.items()}
    return runner.medians(runner.in_turns(turns, rounds), 1)


def many(spec: str, side: str, dim: int, tokens: int, rounds: int) -> list[runner.Row]:
    """Time encoding and decoding of `tokens` tokens."""
    method = parse_spec(spec).key
    codec = (method.key_codec if side == "k" else method.value_codec)(dim, torch.float32)
    x = torch.randn(1, HEADS, tokens, dim, generator=torch.Generator().manual_seed(0))
    if isinstance(codec, FittedCodec):
        codec = codec.fit(x[:, :, : codec.learns_from])
    store = SegmentList(codec, 1, HEADS, torch.device("cpu")).grown(tokens, 0)
    size = store.segment_tokens
    segments = [store.segment(index) for index in range(-(-tokens // size))]
    matrix = torch.randn(dim, dim)

    def body() -> None:
        # In chunks, as a prefill comes.
        for start in range(0, tokens, size):
            arrays = codec.encode(x[:, :, start : start + size])
            for field in codec.fields:
                field.write(segments[start // size][field.name], 0, arrays[field.name])

    encoding: dict[str, runner.Call] = {}
    if not CodecEncoder(codec).reason:
        encoder = CpuEncoder(library(), codec)
        encoding["native"] = lambda: encoder.write(x, store.source(), 0)
    encoding |= {"torch": body, "matmul": lambda: x @ matrix}
    # The first round fills the slots; that later ones OR the same bits into them costs the same.
    encoded = rounds_of(encoding, rounds)
    view = StreamView(codec, store.source(), tokens, x[:, :, :0], None, None, 0, lambda: None)
    out = torch.empty_like(x)

    def back(backend: str) -> runner.Call:
        plan = choose(backend).stream(codec, x.device, x.dtype)

        def run() -> None:
            for start in range(0, tokens, CHUNK):
                end = min(start + CHUNK, tokens)
                plan.decode(view, start, end, out[:, :, start:end])

        return run

    decoding = {}
    if codec.form is not None and codec.form.kind:
        decoding = {"native": back("cpu"), "torch": back("torch")}
    found = []
    for times in (encoded, rounds_of(decoding, rounds) if decoding else {}):
        row: runner.Row = {"spec": spec, "side": side, "dim": dim}
        row |= {name: x.numel() / seconds / 1e9 for name, seconds in times.items()}
        ratio = {"ratio": times["torch"] / times["native"]} if "native" in times else {}
        found.append(row | ratio)
    return found


def one_token(spec: str, held: tuple[int, ...], rounds: int) -> runner.Row:
    """Time `store` of one token."""
    geometry = CacheGeometry(1, HEADS, 128, None, torch.float32)
    k, v = torch.randn(2, 1, HEADS, 1, 128, generator=torch.Generator().manual_seed(1))
    calls: dict[str, runner.Call] = {}
    for kernel, count in (("auto", held[0]), ("auto", held[-1]), ("torch", held[0])):
        cache = runner.filled(create_cache(spec, geometry, backend=kernel), count, 4096)
        calls[f"{kernel} at {count}"] = lambda cache=cache: cache.store(0, k=k, v=v)
    times = rounds_of(calls, rounds, warm=2)
    found: runner.Row = {name: seconds * 1e6 for name, seconds in times.items()}
    first, last, body = times.values()
    return {"spec": spec, **found, "ratio": body / first, "growth": last / first}


def table(rows: list[runner.Row]) -> str:
    """Return rows as a Markdown table; what a row lacks stays empty."""
    columns = [*max(rows, key=len)] if rows else [""]
    return runner.table(columns, [[row.get(name, "") for name in columns] for row in rows])


def main() -> None:
    options = runner.arguments(__doc__, specs=SPECS, tokens=4096, long=100_000, rounds=9)
    torch.set_num_threads(1)
    level = runner.native_level()
    rows = [
        many(spec, side, dim, options.tokens, options.rounds)
        for spec in options.specs
        for dim in (128, 64)
        for side in "kv"
    ]
    found = {
        "many": [row for row, _ in rows],
        "decoded": [row for _, row in rows if "ratio" in row],
    }
    sizes = (1024, options.long), 40 * options.rounds
    found["one"] = [one_token(spec, *sizes) for spec in options.specs]
    body = ["Many tokens, G values/s; `ratio`: over the torch body.", "", table(found["many"])]
    body += ["", "Decoding, G values/s.", "", table(found["decoded"]), ""]
    body += ["One token's K and V, us; `growth`: the long cache over the short one.", ""]
    body += [table(found["one"])]
    title = "Encoding and decoding"
    runner.report(options, "encode", found, body, title=title, level=level, threads=1)


if __name__ == "__main__":
    main()
