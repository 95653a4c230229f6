"""A real redis-server on a free loopback port, with a password."""

import contextlib
import shutil
import signal
import socket
import subprocess

import pytest

BINARY = shutil.which("redis-server")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """Starts, stops hard, freezes and starts again on the same port."""

    password = "correct horse battery"

    def __init__(self, folder, *options, tls=None):
        self.folder, self.options, self.tls = folder, options, tls
        self.process = None
        for _ in range(5):
            self.port = free_port()
            if self.start():
                return
        raise RuntimeError("redis-server does not start")

    @property
    def url(self):
        return f"{'rediss' if self.tls else 'redis'}://127.0.0.1:{self.port}"

    def start(self):
        ports = ["--port", str(self.port)]
        if self.tls:
            ports = ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
            for name in ("cert", "key"):
                ports += [f"--tls-{name}-file", str(self.tls[name])]
            ports += ["--tls-ca-cert-file", str(self.tls["cert"])]
        command = [
            *(BINARY, *ports, "--bind", "127.0.0.1", "--requirepass", self.password),
            *("--dir", str(self.folder), "--save", "", "--appendonly", "yes"),
            *("--appendfsync", "always", *self.options),
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        # Its own word, and not a wait for some time; it ends where the port is taken.
        return any("Ready to accept connections" in line for line in self.process.stdout)

    def kill(self):
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    @contextlib.contextmanager
    def frozen(self):
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="session")
def start_server():
    """Start a server: ``start_server(folder, *options, tls=None)``."""
    if BINARY is None:
        pytest.skip("redis-server is not installed")
    return Server
