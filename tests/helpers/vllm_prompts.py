"""Prompts for engines, and a pool that is too small for them."""

import torch

# So small a pool that sequences are preempted, and so few tokens a step that prompts are chunked.
SMALL = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 40 * 32 * 2048,
}


def ids(count, seed):
    """Random tokens of the toys."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 512, (count,), generator=generator).tolist()


def prompts_of_unlike_length():
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(3, 512, (96,), generator=generator).tolist()
    lengths = torch.randint(1, 200, (32,), generator=generator).tolist()
    own = [torch.randint(3, 512, (n,), generator=generator).tolist() for n in lengths]
    return [shared + one if i % 3 == 0 else one for i, one in enumerate(own)]


def check_that_the_pool_was_small(answer):
    assert answer["metrics"]["vllm:num_preemptions"] > 0
    assert answer["metrics"]["vllm:prefix_cache_hits"] > 0
    assert answer["all_free"]
