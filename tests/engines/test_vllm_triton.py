"""What an engine answers whose pages the Triton kernels read and write, interpreted."""

from vllm_engine import PROCESS
from vllm_prompts import ids

SMALL = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 48}


def test_tokens_are_those_of_the_native_kernels(run_vllm, toy):
    spec = "turboquant:bits=4,sinks=0,window=8"
    shared = ids(40, seed=2)
    batches = [[[[*shared, 7, 9], shared, [5]], 6], [[[*shared, 7, 9, 4], [6, 8]], 3]]
    native = run_vllm(spec, model=toy, greedy=batches, **SMALL)
    script = PROCESS.with_name("vllm_interpreted.py")
    triton = run_vllm(spec, script=script, model=toy, greedy=batches, **SMALL)
    assert "attend cpu" in native["log"]
    assert "attend triton, encode k triton, decode k triton" in triton["log"]
    assert triton["greedy"] == native["greedy"]
    assert triton["metrics"]["vllm:prefix_cache_hits"] > 0 and triton["all_free"]
