"""Names that are in use elsewhere: aliases where they mean exactly the same, else refused."""

from __future__ import annotations

from kvpact.registry import Alias, Foreign

# ggml's block formats: groups of 32 channels, one fp16 scale, nothing held exactly.
Q8_0 = Alias("q8_0", "int:bits=8,sinks=0,window=0")
Q4_0 = Alias("q4_0", "int:bits=4,sinks=0,window=0")
# The serving engines' default fp8 cache: rounded without a scale.
FP8_E4M3 = Alias("fp8_e4m3", "fp8:scale=none,sinks=0,window=0")
# turboquant-rs: 3 and 4 bits in all, without (pqo) and with (tq) QJL on K.
PQO3 = Alias("pqo3", "turboquant:bits=3,scale=l2,sinks=0,window=0")
PQO4 = Alias("pqo4", "turboquant:bits=4,scale=l2,sinks=0,window=0")
_PROD = "turboquant:bits={0},mode=prod,scale=l2,sinks=0,window=0"
TQ3 = Alias("tq3", _PROD.format(3))
TQ4 = Alias("tq4", _PROD.format(4))

_VLLM = "vLLM's format rotates without signs, keeps V uniform and unrotated, and skips four layers"
TURBOQUANT_K8V4 = Foreign("turboquant_k8v4", "fp8/turboquant:bits=4", _VLLM)
TURBOQUANT_4BIT_NC = Foreign("turboquant_4bit_nc", "turboquant:bits=4", _VLLM)
TURBOQUANT_K3V4_NC = Foreign("turboquant_k3v4_nc", "turboquant:bits=3/turboquant:bits=4", _VLLM)
TURBOQUANT_3BIT_NC = Foreign("turboquant_3bit_nc", "turboquant:bits=3", _VLLM)
