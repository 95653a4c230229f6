"""A server of llama.cpp, as a program of its own."""

import json
import re
import subprocess
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from kvpact.integrations.llama_cpp import programs


class Server:
    """``llama-server`` with eight sequences; `log` is all that it has printed."""

    def __init__(self, program, model, cells, **variables):
        words = [program, "-m", model, "--host", "127.0.0.1", "--port", 0, "-np", 8, "-c", 8192,
                 "-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0", "-t", 2, "--cache-ram", 0,
                 "-lv", 5, cells]  # fmt: skip
        self.log, self.address, ready = [], "", threading.Event()
        self.process = subprocess.Popen(
            [*map(str, words)], env=programs.clean(variables), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip

        def read():
            for line in self.process.stdout:
                if "splits" in line or not ready.is_set():
                    self.log.append(line)
                if found := re.search(r"listening on (http\S+)", line):
                    self.address = found[1]
                    ready.set()
            ready.set()

        self.reader = threading.Thread(target=read)
        self.reader.start()
        ready.wait()
        assert self.address, "".join(self.log[-20:])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.terminate()
        self.reader.join(60)
        assert self.process.wait(60) == 0

    def ask(self, path, **body):
        """Return the server's answer."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(
            self.address + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=3600) as answer:
            return json.load(answer)

    def likely(self, prompt, tokens, **options):
        """Return log-probabilities after a prompt and each token: of the one that follows first."""
        found = self.ask("/completion", prompt=prompt, n_predict=tokens, temperature=0, n_probs=10,
                         ignore_eos=True, **options)  # fmt: skip
        places = found["completion_probabilities"]
        found = [{x["id"]: x["logprob"] for x in (y, *y["top_logprobs"])} for y in places]
        assert len(found) == tokens
        return found

    def complete(self, prompts, tokens):
        """Return what is likely after prompts that come at once, and after the likeliest tokens."""
        with ThreadPoolExecutor(len(prompts)) as clients:
            one = partial(self.likely, tokens=tokens, cache_prompt=False)
            return list(clients.map(one, prompts))

    def follow(self, prompts, texts):
        """Return what is likely before each token of texts behind prompts, one after the other."""
        pairs = zip(prompts, texts, strict=True)
        places = [prompt + text[:i] for prompt, text in pairs for i in range(len(text))]
        return [self.likely(place, 1, id_slot=0)[0] for place in places]

    def resident(self):
        """Return the bytes of memory that the process holds."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024

    def splits(self):
        """Return into how many parts a graph was split at most."""
        return max(int(n) for n in re.findall(r"splits = (\d+)", "".join(self.log)))
