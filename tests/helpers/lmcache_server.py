"""A real LMCache server with kvpact's serde over folders, on free loopback ports."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request

from redis_server import free_port

CHUNK = 64


class LMCacheServer:
    """Starts; `stores` are folders and the options of the serde before each, read in this order."""

    def __init__(self, *stores):
        self.port, self._http = free_port(), free_port()
        both = [(str(path), {"type": "kvpact", **serde}) for path, serde in stores]
        adapters = [{"type": "fs", "base_path": path, "serde": serde} for path, serde in both]
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "kvpact.integrations.lmcache", "server"),
                *("--host", "127.0.0.1", "--port", str(self.port), "--http-port", str(self._http)),
                *("--chunk-size", str(CHUNK), "--l1-size-gb", "0.1", "--no-l1-use-lazy"),
                *("--eviction-policy", "LRU", "--disable-metrics"),
                # A name of its own in /dev/shm; without one LMCache would unpickle what comes in.
                *("--supported-transfer-mode", "engine_driven"),
                *("--shm-name", f"kvpact-{os.getpid()}-{self.port}"),
                *(x for adapter in adapters for x in ("--l2-adapter", json.dumps(adapter))),
            ],
            env={**os.environ, "LMCACHE_TRACK_USAGE": "false"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines, self._told = [], threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._told.wait(300)
        self.answered = self.process.poll() is None

    def _read(self):
        for line in self.process.stdout:
            self._lines.append(line)
            if "Application startup complete" in line:
                self._told.set()
        self.process.wait()
        self._told.set()

    @property
    def log(self):
        return "".join(self._lines)

    @property
    def for_vllm(self):
        """What vLLM is started with."""
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": self.port,
            },
        }

    def _ask(self, path, body=None):
        url, data = f"http://127.0.0.1:{self._http}/{path}", body and json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def counts(self):
        """What the serdes counted, as the server's status has it."""
        return self._ask("status")["kvpact"]

    def written(self, condition):
        """Wait until a condition of the counts holds and nothing waits to be written."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            status = self._ask("status")
            writes = status["storage_manager"]["store_controller"]
            busy = writes["pending_keys_count"] + writes["in_flight_task_count"]
            if not busy and condition(status["kvpact"]):
                return status["kvpact"]
        raise AssertionError(f"{status['kvpact']}: {self.log[-6000:]}")

    def forget(self):
        """Empty LMCache's memory; what is left are the files."""
        self._ask("cache/clear", {"tier": "l1"})

    def close(self):
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)
        self._reader.join()
        self.process.stdout.close()

    def __enter__(self):
        assert self.answered, self.log[-6000:]
        return self

    def __exit__(self, kind, *_):
        if kind is not None:
            self.process.kill()
        self.close()
