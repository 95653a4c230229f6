"""Attention, prompts, encoding and a whole model on a CUDA device, beside exact caches.

    python benchmarks/gpu.py [--specs turboquant:bits=4 …] [--tokens 4096 …] [--batch 1 8 64] …

*decode*: a step's attention over so many tokens and rows, 32 query heads, 8 KV heads of 128, bf16,
each work captured as a graph, all in turns; the ratio is that of the fastest exact kernel's median
to ours; "general kernel" is what attends where the fast kernels do not. *latent*: the same over MLA
latents (16 heads, 512 + 64). *prompt*: a chunk behind a packed past. *encode*: K and V of a prompt
into slots. *model*: a Llama of SmolLM2's shape with random weights, end to end beside
`DynamicCache`, called as ever and as a graph; before its steps what the prompt took of the device,
the peak of what was allocated, and of what torch reserved, which is what others can't have.
--memory are the most gigabytes of exact K and V; with --dry it runs without a GPU, too.
Bytes a second are those of the slots (of K and V, where they are exact) over the time of a step.
"""

import itertools
import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import gpu_timing as gpu
import runner
import torch
from gpu_timing import DEVICE, Works, captured, exact_kernels, forget
from runner import Row

from kvpact import AttendConfig, CacheGeometry, create_cache
from kvpact.integrations.transformers.versions import named
from kvpact.kernels import AttendCall

SPECS = ["turboquant:bits=4", "turboquant:bits=3", "turboquant:bits=2", "trellis:bits=4"]
SPECS += ["int:bits=8", "int:bits=4", "fp8", "kivi:bits=4"]
Q_HEADS, HEADS, DIM = 32, 8, 128
GEOMETRY = CacheGeometry(1, HEADS, DIM, dtype=torch.bfloat16)
WHOLE = AttendConfig(is_causal=False)
SDPA = torch.nn.functional.scaled_dot_product_attention
LATENT, ROPE, LATENT_HEADS = 512, 64, 16
GRAPH, GENERAL = ", graph", ", general kernel"


def filled(spec: str, geometry: CacheGeometry, batch: int, tokens: int) -> Any:
    """Return a cache with random tokens in bf16."""
    cache = create_cache(spec, geometry, check="deferred")
    return runner.filled(cache, tokens, 4096, batch, DEVICE)


def random(*shape: int) -> torch.Tensor:
    """Return random numbers in bf16."""
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def beside(
    options: runner.Options, part: str, shape: str, works: Works, exact_bytes: int,
    q: torch.Tensor, held: tuple[CacheGeometry, int, int], config: AttendConfig = WHOLE,
    capture: Callable[[Any], Any] = captured, general: bool = False,
) -> Iterator[Row]:  # fmt: skip
    """Measure attention over caches of each spec beside works over exact K and V, all in turns."""
    exact, kept = set(works), []
    works = {name: capture(work) for name, work in works.items()}
    nbytes = dict.fromkeys(works, exact_bytes)
    for spec in options.specs:
        cache = filled(spec, *held)
        if capture is captured and (reason := not_by_kernels(cache)):
            print(f"{part}, {shape}, {spec}: left out, {reason}", flush=True)
            continue
        kept.append(cache)
        works[spec] = capture(attention(cache, q, config))
        if general:
            works[spec + GENERAL] = capture(generally(cache, q))
        nbytes |= dict.fromkeys((spec, spec + GENERAL), cache.memory_usage())
    yield from table(options, part, shape, works, nbytes, exact)
    del works, kept
    forget()


def decode(options: runner.Options) -> Iterator[Row]:
    """Measure a decode step's attention."""
    for batch, tokens in itertools.product(options.batch, options.tokens):
        size, shape = 4 * batch * HEADS * tokens * DIM, f"{batch} x {tokens}"
        if size <= options.memory * 1e9:
            q, k = random(batch, Q_HEADS, 1, DIM), random(batch, HEADS, tokens, DIM)
            exact, held = exact_kernels(q, k, torch.randn_like(k)), (GEOMETRY, batch, tokens)
            yield from beside(options, "decode", shape, exact, size, q, held, general=True)
            del k, exact


def attention(
    cache: Any, q: torch.Tensor, config: AttendConfig = WHOLE
) -> Callable[[], torch.Tensor | None]:
    """Return the attention over the tokens held alone: without the kernels that store.

    What is sent to the device for a call is sent here; a step's graph has it there, too.
    """
    layer = cache._layers[0]
    held = layer._held
    view = layer._view(held, held.padding)
    call = AttendCall(view, None, None, q, config, held.padding, cache.geometry.latent)
    if DEVICE == "cpu":
        return partial(held.plan.attend, [call])
    from kvpact.kernels.triton.attend.attend import attend_prepared, prepared

    out = q.new_empty(*q.shape[:3], call.output_dim)
    return partial(attend_prepared, prepared([call], [0]), [call], out)


def generally(cache: Any, q: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """Return attention by the general kernel alone, which the fast ones have to be worth."""
    if DEVICE == "cpu":
        return attention(cache, q)
    from kvpact.kernels.triton.digits import fast

    least, fast.LEAST_TOKENS = fast.LEAST_TOKENS, sys.maxsize
    try:
        return attention(cache, q)
    finally:
        fast.LEAST_TOKENS = least


def not_by_kernels(cache: Any) -> str:
    """Return why other than kernels of the device attend; their steps can't be captured."""
    plan = cache._layers[0]._held.plan
    if DEVICE == "cpu" or plan._name == "triton":
        return ""
    return plan.compute.stats()["reasons"].get(f"attend: {plan._name}", "")


def table(
    options: runner.Options, part: str, shape: str, works: Works, nbytes: dict[str, int],
    exact: Collection[str] = (),
) -> Iterator[Row]:  # fmt: skip
    """Measure works in turns; yield a row of each, and print it."""
    found = {
        name: gpu.summary(times) for name, times in gpu.microseconds(works, options.rounds).items()
    }
    best = min((found[name]["us"] for name in exact), default=float("nan"))
    for name, row in found.items():
        speed = nbytes[name] / row["us"] * 1e6
        more = {"bytes/s": speed, "of read bandwidth": speed / options.read}
        more |= {"ratio": best / row["us"]}
        made = {"part": part, "shape": shape, "what": name, **row, **more}
        print(line(made), flush=True)
        yield made


def line(r: Row) -> str:
    """Return a row of the report."""
    if "reserved" in r:
        sizes = ", ".join(f"{x} {r[x] / 1e6:.0f} MB" for x in ("allocated", "reserved", "peak"))
        return f"| {r['part']} | {r['shape']} | {r['what']} | {sizes} | | | |"
    time = f"{r['us']:.1f} ({r['low']:.1f} to {r['high']:.1f})"
    share = f"{r['bytes/s'] / 1e12:.2f} | {r['of read bandwidth']:.0%} | {r['ratio']:.2f}"
    return f"| {r['part']} | {r['shape']} | {r['what']} | {time} | {share} |"


def encode(options: runner.Options) -> Iterator[Row]:
    """Measure how K and V of a prompt are stored."""
    x = random(1, HEADS, 16384, DIM)
    for spec in options.specs:
        cache = create_cache(spec, GEOMETRY, check="deferred")
        cache.store(0, k=x, v=x)

        def work(cache: Any = cache) -> None:
            cache.reset()
            cache.store(0, k=x, v=x)

        yield from table(options, "encode", "16384", {spec: work}, {spec: 2 * x.nbytes})


def prompt(options: runner.Options) -> Iterator[Row]:
    """Measure the attention of a chunk of 512 tokens behind a packed past."""
    for tokens in options.tokens:
        q, k = random(1, Q_HEADS, 512, DIM), random(1, HEADS, tokens, DIM)
        works = {"torch sdpa": partial(SDPA, q, k, torch.randn_like(k), enable_gqa=True)}
        held, size = (GEOMETRY, 1, tokens), 4 * HEADS * tokens * DIM
        given = "chunk", f"512 over {tokens}", works, size, q, held
        yield from beside(options, *given, capture=lambda work: work)


def latent(options: runner.Options) -> Iterator[Row]:
    """Measure a decode step's attention over MLA latents."""
    geometry = CacheGeometry.mla(1, LATENT, ROPE, dtype=torch.bfloat16)
    config = AttendConfig(softmax_scale=(DIM + ROPE) ** -0.5, is_causal=False)
    for batch, tokens in itertools.product(options.batch, options.tokens):
        q = random(batch, LATENT_HEADS, 1, LATENT + ROPE)
        c = random(batch, 1, tokens, LATENT + ROPE)

        def matmul(q=q, c=c) -> torch.Tensor:
            scores = q.transpose(1, 2) @ c.mT * config.softmax_scale
            return torch.softmax(scores, -1) @ c[..., :LATENT]

        held, works = (geometry, batch, tokens), {"torch matmul": matmul}
        given = "latent", f"{batch} x {tokens}", works, c.nbytes, q, held, config
        yield from beside(options, *given)


def random_model(layers: int) -> Any:
    """Return a Llama of SmolLM2's shape: times do not depend on weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=2**18,
        tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to(DEVICE, torch.bfloat16)


def model(options: runner.Options) -> Iterator[Row]:
    """Measure decode steps of a model beside `DynamicCache`, and peak memory."""
    from transformers import DynamicCache

    from kvpact.integrations.transformers import CompressedCache
    from kvpact.integrations.transformers.graphs import DecodeGraph

    theirs, ours = random_model(options.layers), random_model(options.layers)
    draw = torch.Generator().manual_seed(0)
    longest = max(1024, *options.tokens[:2]) + 1
    ids = torch.randint(theirs.config.vocab_size, (1, longest), generator=draw).to(DEVICE)
    for tokens in sorted({*([1024] if DEVICE == "cuda" else []), *options.tokens[:2]}):
        works, peaks = {}, {}
        for name, network, cache in (
            ("DynamicCache", theirs, DynamicCache(config=theirs.config)),
            *(
                (spec + how, ours, CompressedCache(ours.config, spec, check="deferred"))
                for spec in options.specs[:2]
                for how in (("", GRAPH) if DEVICE == "cuda" else ("",))
            ),
        ):
            forget()
            with torch.no_grad():
                for part in ids[:, :tokens].split(2048, 1):
                    network(part, **named(cache), logits_to_keep=1)
            step = ids[:, tokens : tokens + 1]
            works[name] = lambda n=network, c=cache, s=step: n(s, **named(c))
            if name.endswith(GRAPH):
                works[name] = partial(DecodeGraph(network, cache), step)
            made = {"part": "model memory", "shape": str(tokens), "what": name, **gpu.peaks_of()}
            peaks[name] = made["allocated"]
            print(line(made), flush=True)
            yield made
        with torch.no_grad():
            yield from table(options, "model step", str(tokens), works, peaks, ["DynamicCache"])


PARTS = {"decode": decode, "latent": latent, "prompt": prompt, "encode": encode, "model": model}


def main() -> None:
    options = runner.arguments(
        __doc__, specs=SPECS, tokens=[4096, 16384, 65536, 131072], batch=[1, 8, 64], parts=PARTS,
        rounds=30, layers=30, memory=60.0, dry=False,
    )  # fmt: skip
    if DEVICE == "cpu" and not options.dry:
        sys.exit("no CUDA device is there; nothing was measured")
    import triton

    speeds = gpu.bandwidth(options.rounds)
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "none: a dry run"
    told = {"gpu": name, "cuda": torch.version.cuda, "triton": triton.__version__}
    options.read = speeds["read"]
    told |= {name: f"{speed:.3g} B/s" for name, speed in speeds.items()}
    columns = ("part", "shape", "what", "us (quartiles)", "TB/s", "of read", "over exact")
    first = runner.table(columns, [], 3)
    print(runner.head(options.about | told), first, sep="\n\n", flush=True)
    rows: list[Row] = []
    for part in options.parts:
        for row in PARTS[part](options):
            rows.append(row)  # and written each time: a later one may fail
            runner.report(options, "gpu", rows, [first, *map(line, rows)], last=False, **told)


if __name__ == "__main__":
    main()
