"""As `vllm_process.py`, with Triton's interpreter, and vLLM's CPU worker, in the place of a GPU."""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from vllm_process import main

import kvpact.integrations.vllm as plugin
from kvpact.integrations.vllm import damage, setting
from kvpact.kernels import choose
from kvpact.kernels.triton.backend import TritonBackend


def interpreted_plan(k, v, dtype, device, latent):
    assert not latent
    compute = choose("triton", check="deferred")
    return compute.plan(compute.stream(k, device, dtype), compute.stream(v, device, dtype))


def register(register=plugin.register):
    register()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, "kvpact.integrations.vllm.cuda.CudaBackend")


if __name__ == "__main__":
    for name in ("choose", "plan"):
        sys.modules[f"kvpact.kernels.{name}"].BACKENDS = (TritonBackend(on_cpu=True),)
    setting.native_plan = interpreted_plan
    interpreted = damage.Watch("cpu")
    damage.watch_of = lambda kind: interpreted
    plugin.register = register
    main()
