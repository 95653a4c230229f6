"""Programs that say what llama.cpp's say, without computing anything."""

import sys
from textwrap import dedent

NAMES = ("llama-bench", "llama-cli", "llama-perplexity", "llama-server", "test-backend-ops")
SOURCE = """\
    import json, os, signal, sys
    name, path = os.path.basename(sys.argv[0]), os.environ.get("GGML_BACKEND_PATH")
    parsed = os.environ.get("LLAMA_ARG_OVERRIDE_TENSOR") == "none=CPU"
    good = path is not None and "refused" not in path
    if "endless" in sys.argv:
        signal.pause()
    elif "--list-devices" in sys.argv:
        print("noise: KVPACT\\nAvailable devices:")
        print("  KVPACT: attention (0 MiB, 0 MiB free)" if good else "  (none)")
        if not good:
            print("kvpact: ggml 9 is refused: for a test", file=sys.stderr)
            sys.exit(f"load_backend: backend {path} is not supported on this system")
    elif name == "llama-bench":
        if "broken.gguf" in sys.argv:
            sys.exit("main: error: failed to load model")
        assert sys.argv[sys.argv.index("-d") + 1 :] == "2048 -r 1 -o json".split()
        kind = sys.argv[sys.argv.index("-ctk") + 1]
        used = good and kind != "f16"
        if good and os.environ["KVPACT_GGML_COUNT"] == "1":
            print(f"kvpact: computed {480 * used} attentions", file=sys.stderr)
        row = {"n_prompt": 0, "n_gen": 16, "avg_ns": (4 if used else 10) * 16_000_000}
        print(json.dumps([{**row, "backends": "kvpact,BLAS" if good else "CPU"}]))
    elif name == "test-backend-ops":
        assert os.environ["KVPACT_GGML_ALL"] == os.environ["KVPACT_GGML_F16"] == "1"
        print("Backend 1/2: KVPACT")
        for case, told in enumerate(("\\x1b[1;32mOK\\x1b[0m", "not supported [kvpact]", FAIL)):
            print(f"  FLASH_ATTN_EXT(hsk={case},kv=512): {told}")
        sys.exit("FAIL" in FAIL)
    elif good and (name == "llama-cli" or name == "llama-server" and parsed):
        assert os.environ["LD_DEBUG"] == "files"
        print(f"1: file={path} [0];  dynamically loaded by libggml.so", file=sys.stderr)
"""


def write(folder, names=NAMES, fails=False):
    """Write programs of a build into a folder, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    told = "[FLASH_ATTN_EXT] ERR = 1 \\x1b[1;31mFAIL\\x1b[0m" if fails else "\\x1b[1;32mOK\\x1b[0m"
    for name in names:
        path = folder / name
        path.write_text(f'#!{sys.executable}\nFAIL = "{told}"\n{dedent(SOURCE)}', "utf-8")
        path.chmod(0o755)
    return folder
