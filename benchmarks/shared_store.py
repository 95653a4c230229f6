"""Stores between processes: MB/s of put and get in a directory, on redis and in a Mooncake cluster.

    python benchmarks/shared_store.py [--size 4] [--entries 24] [--rounds 5]

One process puts entries of --size MiB of random bytes, a second one gets them; both check and seal
as always. *plain* is the same bytes through a TCP connection on loopback, from a process that does
nothing else. The Mooncake cluster is a master and a third process that gives memory, so every
entry goes over TCP. Medians of all entries but each process's first. What is not installed is left
out, and said.
"""

import importlib.util
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import children
import runner

from kvpact.stores import open_store

OPTIONS = {"timeout": 30.0}


def timed(operation: str, url: str, size: int, entries: int) -> list[float]:
    """Put or get every entry; return seconds of each."""
    seconds = []
    with open_store(url, **({} if url.startswith("/") else OPTIONS)) as store:
        for index in range(entries):
            name, blob, found = f"k{index}", random.Random(index).randbytes(size), []
            get = partial(store.get, name)
            call = partial(store.put, name, blob) if operation == "put" else get
            seconds.append(runner.turn_of(lambda call=call, found=found: found.append(call()))())
            assert operation == "put" or found == [blob], "another entry came back"
    return seconds


def plain(size: int, entries: int) -> list[float]:
    """Receive as many bytes from a process that sends them; return seconds of each piece."""
    code = (
        "import socket, sys\n"
        "s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        "blob = bytes(int(sys.argv[2]))\n"
        "for _ in range(int(sys.argv[3])):\n    s.recv(1)\n    s.sendall(blob)\n"
    )
    seconds, buffer = [], bytearray(size)
    with socket.create_server(("127.0.0.1", 0)) as server:
        arguments = [str(server.getsockname()[1]), str(size), str(entries)]
        with subprocess.Popen([sys.executable, "-c", code, *arguments]):
            connection, _ = server.accept()
            with connection:
                for _ in range(entries):
                    begin, got = time.perf_counter(), 0
                    connection.sendall(b"?")
                    while got < size:
                        got += connection.recv_into(memoryview(buffer)[got:])
                    seconds.append(time.perf_counter() - begin)
    return seconds


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def server(command: list[str], *ports: int) -> Iterator[None]:
    """Run a server until the block ends; it listens on all ports before the block begins."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet)
    try:
        for port in ports:
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except OSError:
                    with suppress(subprocess.TimeoutExpired):
                        code = process.wait(0.01)
                        raise RuntimeError(f"{command[0]} ended with {code}") from None
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def place(kind: str, room: int) -> Iterator[str | None]:
    """Yield the URL of an empty store, or None where its server is not installed."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port, admin = free_port(), free_port()
        if kind == "directory":
            yield str(folder / "store")
        elif kind == "redis":
            binary = shutil.which("redis-server")
            if binary is None or importlib.util.find_spec("redis") is None:
                return (yield None)
            options = ["--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
            stack.enter_context(server([binary, "--port", str(port), *options], port))
            yield f"redis://127.0.0.1:{port}"
        else:
            binary = shutil.which("mooncake_master", path=Path(sys.executable).parent)
            if binary is None:
                return (yield None)
            options = [f"--rpc_port={port}", "--rpc_address=127.0.0.1"]
            options += [f"--metrics_port={admin}", "--metrics_host=127.0.0.1"]
            stack.enter_context(server([binary, *options], port, admin))
            url = f"mooncake://127.0.0.1:{port}?admin={admin}"
            stack.enter_context(open_store(url, segment_size=room, **OPTIONS))
            yield url


def both(kind: str, room: int, size: int, entries: int) -> dict[str, list[float]]:
    """Return the seconds of all entries but the first, to put and to get, each in a process."""
    if kind == "plain":
        return {"get": plain(size, entries)[1:]}
    with place(kind, room) as url:
        return {
            operation: children.asked(__file__, [operation, url, size, entries])[1:]
            for operation in (("put", "get") if url else ())
        }


def main() -> None:
    if children.answer(timed):
        return
    options = runner.arguments(__doc__, size=4.0, entries=24, rounds=5)
    size = int(options.size * (1 << 20))
    room = max(64 << 20, 2 * size * options.entries)
    kinds = ("plain", "directory", "redis", "mooncake")
    turns = {kind: partial(both, kind, room, size, options.entries) for kind in kinds}
    rows, cells = [], []
    for kind, rounds in runner.in_turns(turns, options.rounds, warm=0).items():
        seconds = {name: [x for each in rounds for x in each[name]] for name in rounds[0]}
        rows.append({"store": kind, "ms": runner.medians(seconds)})
        speeds = {name: f"{size / 1e3 / ms:.0f}" for name, ms in rows[-1]["ms"].items()}
        name = kind if speeds else f"{kind}, not installed"
        cells.append([name, speeds.get("put", "-"), speeds.get("get", "-")])
    body = runner.table(" | put MB/s | get MB/s", cells)
    runner.report(options, "shared_store", rows, body, ("entries", "size", "rounds"))


if __name__ == "__main__":
    main()
