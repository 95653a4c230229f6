"""Build llama.cpp without knowledge of kvpact, out of llama-cpp-python's sdists.

    python tools/llama/builds.py FOLDER [--jobs N]

FOLDER/VERSION has `source`, the programs `linked/bin` (ggml's backends are linked), `dynamic/bin`
(they are loaded at the start, as in release binaries), and `venv` with llama-cpp-python, for the
pinned version and, if it is another one, the newest. They run on any x86-64 with AVX2
(``GGML_NATIVE=OFF``), hence without AMX, whose instructions some virtual machines announce and
don't execute. Nothing is timed with them.
"""

from __future__ import annotations

import argparse
import os
import site
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

PINNED = "0.3.36", "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
PROGRAMS = ("llama-bench", "llama-perplexity", "llama-server", "test-backend-ops")
OPTIONS = ["-DGGML_NATIVE=OFF", "-DCMAKE_BUILD_TYPE=Release"]
# No libraries that a machine may lack, and nothing to download.
PLAIN = ["-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_UI=OFF",
         "-DLLAMA_USE_PREBUILT_UI=OFF"]  # fmt: skip
KINDS = {"linked": [], "dynamic": ["-DGGML_BACKEND_DL=ON"]}


def run(*words: object, **variables: str) -> None:
    """Run a command, or end with what it printed."""
    print("+", *words, flush=True)
    done = subprocess.run([*map(str, words)], env=os.environ | variables, stdin=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(done.returncode)


def sdist(folder: Path, version: str, sha256: str) -> Path:
    """Download a version of llama-cpp-python, "" for the newest, and return its sources."""
    wanted = folder / "requirement.txt"
    wanted.write_text(f"llama-cpp-python=={version} --hash=sha256:{sha256}" if version
                      else "llama-cpp-python")  # fmt: skip
    place = folder / "sdists" / (version or "newest")
    if not version or not list(place.glob("*.tar.gz")):
        run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary",
            "llama-cpp-python", "-d", place, "-r", wanted)  # fmt: skip
    newest = max(place.glob("*.tar.gz"), key=lambda path: path.stat().st_mtime)
    source = folder / newest.name.removesuffix(".tar.gz").rpartition("-")[2] / "source"
    if not source.is_dir():
        with tarfile.open(newest) as file:
            file.extractall(source.with_name("unpacking"), filter="data")
        (inner,) = source.with_name("unpacking").iterdir()
        inner.rename(source)
    return source


def build(
    source: Path, place: Path, options: list[str], programs: tuple[str, ...], jobs: int
) -> None:
    """Configure and compile programs of llama.cpp; what was compiled before stays."""
    run("cmake", "-S", source / "vendor" / "llama.cpp", "-B", place, *OPTIONS, *PLAIN, *options)
    run("cmake", "--build", place, "--parallel", jobs, "--target", *programs)


def install(source: Path, place: Path, jobs: int) -> None:
    """Install llama-cpp-python beside what this interpreter has, kvpact among it."""
    python = place / "bin" / "python"
    if not python.with_name("pip").is_file():  # the last thing that is put there
        venv.create(place, with_pip=True, clear=True)
        (found,) = place.glob("lib/*/site-packages")
        beside = (f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages())
        (found / "beside.pth").write_text("".join(beside))
    if not list(place.glob("lib/*/site-packages/llama_cpp")):
        run(python, "-m", "pip", "install", "--quiet", source, CMAKE_ARGS=" ".join(OPTIONS),
            CMAKE_BUILD_PARALLEL_LEVEL=str(jobs))  # fmt: skip


def main() -> None:
    """Build everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    folder, jobs = options.folder.absolute(), options.jobs
    folder.mkdir(parents=True, exist_ok=True)
    for source in dict.fromkeys((sdist(folder, *PINNED), sdist(folder, "", ""))):
        for kind, more in KINDS.items():
            build(source, source.with_name(kind), more, PROGRAMS, jobs)
        install(source, source.with_name("venv"), jobs)


if __name__ == "__main__":
    main()
