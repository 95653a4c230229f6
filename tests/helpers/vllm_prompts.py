"""Prompts for engines, and a pool that is too small for them."""

import random

import torch

# So small a pool that sequences are preempted, and so few tokens a step that prompts are chunked.
SMALL = {
    "dtype": "float32", "max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 40 * 32 * 2048,
}  # fmt: skip


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


def random_requests(seed, count=200):
    """Prompts of unlike length, many with a common beginning, some that go on where one ended."""
    draw = random.Random(seed)

    def words(least, most):
        return [draw.randrange(3, 512) for _ in range(draw.randint(least, most))]

    shared, requests, step = [words(n, n) for n in (40, 100, 200)], [], 0
    for _ in range(count):
        begin = draw.choice([[], *shared, *(one["prompt"] for one in requests[-4:])])
        prompt = begin[: draw.randint(0, 250)] + words(1, 90)
        # Not all of an aborted one's tokens can be there when it is aborted.
        aborted = step + draw.randint(0, 30) if draw.random() < 0.25 else None
        tokens = draw.randint(1, 40) if aborted is None else 60
        requests.append({"prompt": prompt, "tokens": tokens, "comes": step, "aborted": aborted})
        step += draw.choice((0, 1, 1, 2, 6))
    return requests


def check_that_the_pool_was_small(answer):
    assert answer["metrics"]["vllm:num_preemptions"] > 0
    assert answer["metrics"]["vllm:prefix_cache_hits"] > 0 and answer["all_free"]
