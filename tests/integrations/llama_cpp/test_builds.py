"""Unmodified builds of llama.cpp with kvpact's backend; `make test-llama` makes them and runs this.

What it compares with llama.cpp's own is as near as llama.cpp is to itself with another order of
sums. ``-s`` shows the figures.
"""

import re
import subprocess
from importlib.util import find_spec
from itertools import chain
from math import hypot, inf, sqrt
from pathlib import Path
from statistics import fmean

import pytest
from llama_server import Server

from kvpact.data import book_path
from kvpact.integrations.llama_cpp import environment, programs
from kvpact.integrations.models import GEMMA3, SMOLLM2, _joined

pytestmark = [pytest.mark.llama, pytest.mark.timeout(4 * 3600)]

ROOT = Path(__file__).parents[3]
BUILDS = ROOT / "build" / "llama"
FOUND = {"/".join(path.parts[-3:-1]): path for path in sorted(BUILDS.glob("*/*/bin/llama-bench"))}
MODELS = [
    pytest.param(x, marks=pytest.mark.skipif(find_spec(x.parts[0][0]) is None, reason=x.install))
    for x in (SMOLLM2, GEMMA3)
]


@pytest.fixture(scope="module", params=FOUND or ["none"])
def build(request):
    """Programs of a build."""
    assert FOUND, "`make test-llama` builds llama.cpp"
    return programs.programs(FOUND[request.param].parent)


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model.name)
def model(request, tmp_path_factory):
    return _joined(request.param, request.param.files(), tmp_path_factory.mktemp("model"))


def test_every_program_is_known_to_load_it(build):
    programs.check_loads(build)
    ways = programs.readers(build)
    assert set(ways) == {"llama-server", "llama-perplexity"} and "?" not in ways.values()


def test_operations_are_as_ggmls(build):
    ops = programs.operations(build["test-backend-ops"], "", lambda *_: None, 2 * 3600)
    print(f"\n{ops}, {(ops.passed + ops.failed) / sum(ops):.1%} supported")
    assert ops.failed == 0 and ops.passed > 2000


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "f16"])
def test_logits_are_as_near_as_llama_cpps_own_are_to_each_other(build, model, kind, tmp_path):
    if model.name.startswith("SmolLM2") and kind != "f16":
        pytest.skip("llama.cpp has one order of sums")
    base = tmp_path / "base"
    words = ["-m", model, "-f", book_path(), "-c", 2048, "--chunks", 2, "-fa", "on", "-ctk", kind,
             "-ctv", kind, "-t", 2, "-lv", 5, "--kl-divergence-base", base]  # fmt: skip

    def run(more, variables):
        done = programs.run(
            build["llama-perplexity"], [*words, *more], variables, limit=programs.LIMIT
        )
        assert done.returncode == 0, done.stderr[-500:]
        return done.stdout + done.stderr

    def divergence(parts, more, variables):
        log = run(["--kl-divergence", *more], variables)
        assert max(map(int, re.findall(r"splits = (\d+)", log))) >= parts
        found = re.search(r"Mean +KLD: +([\d.e-]+) ± +([\d.e-]+)", log)
        return float(found[1]), float(found[2])

    run(["-ub", 512], {})
    # One query over f16 has sums of its own in ggml; over codes the order of the weights' sums is
    # another one. SmolLM2's weights have one order alone, so that over codes there is no noise.
    other = ["-ub", 1] if kind == "f16" else ["-ub", 512, "--no-repack"]
    noise, error = divergence(1, other, {})
    for micro in (512, 1):
        ours, own = divergence(2, ["-ub", micro], environment() | programs.ALL_CASES)
        print(f"\n{model.name} {kind} -ub {micro}: KL {ours:.5f} ± {own:.5f}, llama.cpp's own "
              f"{noise:.5f} ± {error:.5f}")  # fmt: skip
        assert ours <= noise + 3 * hypot(error, own)


@pytest.mark.parametrize("cells", ["--kv-unified", "--no-kv-unified"])
def test_a_server_of_eight_sequences(build, cells):
    place = build["llama-server"], SMOLLM2.files()[0], cells
    with Server(*place, **environment()) as server:
        ids = server.ask("/tokenize", content=book_path().read_text("utf-8"))["tokens"]
        resident = []
        for i in range(0, 16_000, 4_000):  # 20,000 tokens in all
            prompts = [ids[i + j : i + j + 500] for j in range(0, 4_000, 500)]
            found = server.complete(prompts, 125)
            resident.append(server.resident())
        print(f"\nresident: {[x >> 10 for x in resident]} KiB, splits: {server.splits()}")
        assert server.splits() > 1
        assert resident[-1] - resident[1] < 4 << 20  # two rounds reach what it needs
    texts = [[next(iter(likely)) for likely in one] for one in found]

    def followed(**variables):
        with Server(*place, **variables) as server:
            likely = server.follow(prompts, texts)
            assert (server.splits() > 1) == bool(variables)
            return likely

    own = followed()

    def apart(places):
        """Return by how many nats what is likely differs from llama.cpp's own, rms."""
        pairs = zip(places, own, strict=True)
        return sqrt(fmean((x[i] - y[i]) ** 2 for x, y in pairs for i in x.keys() & y.keys()))

    alone, together = apart(followed(**environment())), apart(chain(*found))
    pairs = zip(own, chain(*texts), strict=True)
    margins = [x[next(iter(x))] - x.get(token, -inf) for x, token in pairs]
    print(f"nats from llama.cpp's own, rms: alone {alone:.4f}, together {together:.4f}")
    print(f"other tokens: {sum(x > 0 for x in margins)}, less likely by up to {max(margins):.3f}")
    # Where texts part says little: it is where two tokens are about as likely, and what noise adds
    # there has a tail. So at each of 1,000 tokens the likeliest ten are compared with llama.cpp's
    # own. A sequence alone shows what rounding does, and eight at once may do no more. Ways to
    # compute the same (instruction sets, batches, alone or not) differed by 3 percent in that, and
    # the largest margin of 9,000 places was 5.1 times the rms; other sequences' tokens cost nats.
    assert together <= 1.1 * alone
    assert max(margins) <= 8 * alone


def test_llama_cpp_python(tmp_path):
    python = next(BUILDS.glob("*/venv/bin/python"))
    code = """
import sys
from llama_cpp import Llama
from kvpact.integrations.llama_cpp import enable
assert enable().libraries == enable().libraries
model = Llama(sys.argv[1], n_ctx=2048, n_threads=2, flash_attn=True, type_k=8, type_v=8)
found = model(sys.argv[2], max_tokens=16, temperature=0)["choices"][0]["text"]
print(enable().attentions, found)
"""
    text = book_path().read_text("utf-8")[:4000]
    done = subprocess.run(
        [python, "-c", code, SMOLLM2.files()[0], text], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-500:]
    count, text = done.stdout.split(maxsplit=1)
    assert int(count) > 100 and text.strip()
    print(done.stdout)
