"""The commands of docs/vllm.md and docs/serving.md, pasted into a shell of a fresh environment.

It has kvpact's wheel, which `make test-engines` builds, and the packages of the environment of
these tests. MODEL, folders and ports are replaced; servers get options for little memory.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest
from doc_snippets import ROOT, blocks
from mooncake_cluster import why_not
from redis_server import free_port

from kvpact.data import book_path
from kvpact.integrations.models import SMOLLM2, packaged_folder

VLLM, SERVING = ROOT / "docs" / "vllm.md", ROOT / "docs" / "serving.md"
SERVER = "python -m vllm.entrypoints.openai.api_server"
RUN = (
    (VLLM, "kvpact calibrate MODEL"), (VLLM, "KVPactConnector"),
    (SERVING, "export KVPACT_VLLM_SPEC"), (SERVING, "kvpact calibrate MODEL"),
    (SERVING, "kvpact.integrations.lmcache server"), (SERVING, "LMCacheMPConnector"),
    (SERVING, "8080/status"), (SERVING, "mooncake_master"), (SERVING, "mooncake_client"),
    (SERVING, "kvpact store stats"),
)  # fmt: skip
NOT_RUN = {
    "kvpact eval": "takes minutes, and two models",
    ".venv-vllm/bin/python": "takes minutes, and a clone of the repository",
    "kvpact[triton]": "needs a GPU",
}
PROMPT = book_path().read_text("utf-8")[:2000]
WAIT = 500
"""Seconds in which a program is ready, on a busy machine too."""


def code(page, words):
    assert (page, words) in RUN
    (found,) = [one.code for one in blocks(page) if not one.language and words in one.code]
    return found


def test_all_blocks_are_run_or_have_a_reason():
    for page in (VLLM, SERVING):
        for one in blocks(page):
            reasons = [words for where, words in RUN if where == page and words in one.code]
            reasons += [words for words in NOT_RUN if words in one.code]
            assert one.language or len(reasons) == 1, one.code


class Program:
    """Lines that are pasted into a shell; the last of them stays, or ends by itself."""

    def __init__(self, fresh, text):
        self.text, self._log = text, fresh.folder / f"{len(list(fresh.folder.glob('*.log')))}.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                ["bash", "-e", "-c", text], env=fresh.env, cwd=fresh.folder,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    @property
    def log(self):
        return self._log.read_text(errors="replace")

    def ended(self):
        """Wait until it has ended, and return what it printed."""
        assert self.process.wait(WAIT) == 0, (self.text, self.log[-6000:])
        return self.log

    def wait_for(self, found):
        """Wait until `found` returns something, and return it."""
        for _ in range(5 * WAIT):
            with contextlib.suppress(OSError):
                if answer := found():
                    return answer
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.2)
                break
        raise AssertionError(self.text + self.log[-6000:])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for how in (signal.SIGINT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self.process.pid, how)
                self.process.wait(60)


class Fresh:
    """An environment in a folder, where the commands are pasted."""

    def __init__(self, folder, wheel, model):
        self.folder, programs = folder, folder / "venv" / "bin"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", programs.parent], check=True)
        pip = [sys.executable, "-m", "pip", "--python", programs / "python", "install", "-q"]
        subprocess.run([*pip, "--no-deps", "--no-index", wheel], check=True)
        (packages,) = programs.parent.glob("lib/*/site-packages")
        others = [path for path in sys.path if path.endswith("site-packages")]
        (packages / "beside.pth").write_text("\n".join(others))
        for program in Path(sys.executable).parent.glob("mooncake_*"):
            (programs / program.name).symlink_to(program)
        own = ("VLLM_", "KVPACT_VLLM", "PYTHON", "VIRTUAL_ENV")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        self.env = kept | {
            "PATH": f"{programs}:{kept['PATH']}", "HF_HUB_OFFLINE": "1",
            "LMCACHE_TRACK_USAGE": "false", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": "127.0.0.1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }  # fmt: skip
        self.model, self.ports = model, {}

    def paste(self, text):
        """Paste lines of a page."""
        text = re.sub(r"^pip install .*\n", "", text, flags=re.M)
        text = text.replace("MODEL", self.model).replace("/var/cache", str(self.folder))
        for port, other in self.ports.items():
            text = re.sub(rf"\b{port}\b", str(other), text)
        little = f"{SERVER} --host 127.0.0.1 --port {self.ports.get('8000')} --max-model-len 1024"
        text = text.replace(SERVER, f"{little} --kv-cache-memory-bytes {1 << 28}")
        text = text.replace("--shm-name kvpact", f"--shm-name kvpact-docs-{os.getpid()}")
        return Program(self, text)

    def url(self, port, path):
        return f"http://127.0.0.1:{self.ports[port]}/{path}"

    @contextlib.contextmanager
    def serving(self, text):
        """Paste what starts vLLM; it is ready."""
        self.ports["8000"] = free_port()
        with self.paste(text) as program:
            program.wait_for(lambda: urllib.request.urlopen(self.url("8000", "health")))
            yield program

    def ask(self):
        """Return what vLLM answers to the prompt."""
        body = {"model": self.model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        url, data = self.url("8000", "v1/completions"), json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=WAIT) as answer:
            return json.load(answer)["choices"][0]["text"]

    def counted(self, name):
        """Return what vLLM counted under a name until now."""
        with urllib.request.urlopen(self.url("8000", "metrics"), timeout=60) as page:
            lines = re.findall(rf"^vllm:{name}{{.*}} (.*)$", page.read().decode(), re.M)
        return sum(map(float, lines))


@pytest.fixture(scope="module")
def fresh(make_toy, tmp_path_factory):
    wheels = list((ROOT / "build" / "wheel").glob("kvpact-*.whl"))
    if not wheels:
        pytest.skip("no wheel in build/wheel: `make test-engines` builds it")
    real = packaged_folder(SMOLLM2)
    model = Path(make_toy(vocab_size=json.loads((real / "config.json").read_text())["vocab_size"]))
    for path in real.glob("tokenizer*"):
        shutil.copy(path, model)
    folder = tmp_path_factory.mktemp("fresh")
    fresh = Fresh(folder, max(wheels, key=lambda path: path.stat().st_mtime), str(model))
    where = "import kvpact, pathlib; print(pathlib.Path(kvpact.__file__).parents[4])"
    assert fresh.paste(f"python -c '{where}'").ended().strip() == str(fresh.folder / "venv")
    return fresh


def test_a_calibrated_trellis_is_served(fresh):
    with fresh.serving(code(VLLM, "kvpact calibrate MODEL")) as vllm:
        fresh.ask()  # is computed; later ones read what is stored
        assert fresh.ask() == fresh.ask()
        assert "kvpact stores K and V of 2 layers as trellis:bits=4,sinks=0" in vllm.log
        assert f"({fresh.folder}/model.kvcal)" in vllm.log


def test_turboquant_is_served(fresh):
    with fresh.serving(code(SERVING, "export KVPACT_VLLM_SPEC")) as vllm:
        fresh.ask()  # is computed; later ones read what is stored
        assert fresh.ask() == fresh.ask()
        assert "kvpact stores K and V of 2 layers as turboquant:bits=4,sinks=0" in vllm.log


def test_prefixes_are_shared_by_two_servers_one_after_the_other(fresh):
    command = code(VLLM, "KVPactConnector")
    with fresh.serving(command) as vllm:
        fresh.ask()
        right = fresh.ask()  # its prefix comes from its own pages
        vllm.wait_for(lambda: fresh.counted("kvpact_saved_chunks_total") >= 2)
    with fresh.serving(command):
        assert fresh.ask() == right
        assert fresh.counted("kvpact_loaded_tokens_total") >= 256


@pytest.mark.skipif(find_spec("lmcache") is None, reason="LMCache is not installed")
@pytest.mark.skipif(bool(why_not()), reason=f"LMCache's server imports Mooncake: {why_not()}")
def test_lmcache_stores_chunks_of_a_calibrated_trellis(fresh):
    fresh.paste(code(SERVING, "kvpact calibrate MODEL")).ended()
    fresh.ports |= {"5555": free_port(), "8080": free_port()}
    server = code(SERVING, "kvpact.integrations.lmcache server")
    known = f'"spec": "trellis:bits=4", "calibration": "{fresh.folder}/model.kvcal"'
    for given, wanted in (
        ('"head_dim": 128', '"head_dim": 64'),  # that of the model
        ('"spec": "turboquant:bits=4"', known),
    ):
        assert given in server
        server = server.replace(given, wanted)
    with fresh.paste(server) as lmcache:
        lmcache.wait_for(lambda: urllib.request.urlopen(fresh.url("8080", "status")))
        with fresh.serving(code(SERVING, "LMCacheMPConnector")):
            fresh.ask()

            def stored():
                printed = fresh.paste(code(SERVING, "8080/status")).ended()
                (counts,) = json.loads(printed[printed.index("{") :])["kvpact"]
                return counts["stored"] and counts

            counts = lmcache.wait_for(stored)
    assert counts["stored_bytes"] < 0.3 * counts["given_bytes"]
    assert counts["not_stored"] == 0


@pytest.mark.skipif(bool(why_not()), reason=str(why_not()))
def test_a_mooncake_cluster_holds_entries(fresh):
    fresh.ports |= {"50051": free_port(), "9003": free_port()}
    with fresh.paste(code(SERVING, "mooncake_master")) as master:
        master.wait_for(lambda: urllib.request.urlopen(fresh.url("9003", "metrics")))
        with fresh.paste(code(SERVING, "mooncake_client")) as client:
            client.wait_for(lambda: "127.0.0.1" in segments(fresh))
            printed = fresh.paste(code(SERVING, "kvpact store stats")).ended()
    assert re.search(r"MooncakeStore.*\s0 +0\b", printed), printed
    assert '"status":"OK"' in printed


def segments(fresh):
    with urllib.request.urlopen(fresh.url("9003", "get_segments_detail"), timeout=60) as page:
        return page.read().decode()
