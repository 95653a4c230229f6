"""A real vLLM engine in a process of its own, which answers one question after the other."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROCESS = Path(__file__).parents[1] / "engines" / "vllm_process.py"


def sharing(store, **extra):
    """vLLM's option for kvpact's connector over a store."""
    return {
        "kv_transfer_config": {
            "kv_connector": "KVPactConnector",
            "kv_connector_module_path": "kvpact.integrations.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"store": str(store), **extra},
        }
    }


class Engine:
    """Starts at once. kvpact's settings are of the whole process: `spec`, or vLLM's own cache."""

    def __init__(self, folder, spec=None, *, processes=False, script=PROCESS, env=None, **llm):
        more = env or {}
        env = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "KVPACT_VLLM"))}
        env |= {
            "VLLM_HOST_IP": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
            # One process instead of three: a start takes a third of the time.
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
        }
        if spec is not None:
            env["KVPACT_VLLM_SPEC"] = spec
        env |= more
        self._log = folder / "log.txt"
        llm = {"block_size": 32, "kv_cache_memory_bytes": 1 << 28, **llm}
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(script), json.dumps(llm)], env=env, cwd=folder,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip

    @property
    def log(self):
        return self._log.read_text(errors="replace")

    def ask(self, what, **arguments):
        """Ask for a function of the process; wait for what it returns."""
        try:
            self.process.stdin.write(json.dumps([what, arguments]) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended; its log tells
        answer = self.process.stdout.readline()
        assert answer, f"the engine ended: {self.log[-6000:]}"
        return json.loads(answer)

    def close(self):
        """Wait until the process has ended, once or more often; return its exit status."""
        self.process.stdin.close()
        status = self.process.wait(500)
        self.process.stdout.close()
        return status

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is not None:
            self.process.kill()
        self.close()
