"""A real Mooncake master on free loopback ports."""

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from redis_server import free_port

BINARY = shutil.which("mooncake_master", path=Path(sys.executable).parent)


def why_not():
    """Why there is no cluster here, or None."""
    if importlib.util.find_spec("mooncake") is None:
        return "mooncake is not installed (make test-mooncake)"
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        return f"mooncake can't run (Debian: apt-get install libibverbs1 libnuma1): {error}"
    return None if BINARY else "mooncake_master is not beside the interpreter"


class Master:
    """Starts, stops hard, freezes and starts again on the same ports."""

    def __init__(self, *options):
        self.options = options
        for _ in range(5):
            self.port, self.admin = free_port(), free_port()
            if self.start():
                return
        raise RuntimeError("mooncake_master does not start")

    @property
    def url(self):
        return f"mooncake://127.0.0.1:{self.port}?admin={self.admin}"

    def start(self):
        command = [
            *(BINARY, "--rpc_address=127.0.0.1", f"--rpc_port={self.port}"),
            *("--metrics_host=127.0.0.1", f"--metrics_port={self.admin}"),
            *("--client_ttl=2", "--default_kv_lease_ttl=1000", *self.options),
        ]
        nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, **nowhere)
        return all(self._listens(port) for port in (self.port, self.admin))

    def _listens(self, port):
        while self.process.poll() is None:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                return True
        return False

    def kill(self):
        self.process.kill()
        self.process.wait()

    def frozen(self):
        return frozen(self.process.pid)


@contextlib.contextmanager
def frozen(pid):
    """A child of this process stands still."""
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def master(start_master):
    """A master that a test may kill."""
    master = start_master()
    yield master
    master.kill()


@pytest.fixture(scope="session")
def start_master():
    """Start a master: ``start_master(*options)``."""
    if why_not():
        pytest.skip(why_not())
    return Master
