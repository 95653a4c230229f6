"""A model's attention is what it was, in whatever order caches come and go."""

import copy
import pickle
import threading
import weakref

import pytest

from kvpact.integrations.transformers import CompressedCache
from kvpact.integrations.transformers.attention import forward as attention


def test_a_cache_is_made_while_another_thread_frees_the_last_one(llama):
    """The one that is freed does not take the attention from the one that comes."""
    caches = [CompressedCache(llama, "none")]
    loan = weakref.ref(caches[0]._loan)
    with attention._lock:  # what is freed now gives the attention back when the lock is released
        thread = threading.Thread(target=caches.clear)
        thread.start()
        while loan() is not None:
            pass
        cache = CompressedCache(llama, "none")
    thread.join()
    assert llama.config._attn_implementation == "kvpact"
    del cache
    assert llama.config._attn_implementation == "sdpa"


def test_a_choice_of_the_user_outlives_the_caches(llama):
    cache = CompressedCache(llama, "none")
    llama.set_attn_implementation("eager")
    del cache
    assert llama.config._attn_implementation == "eager"
    assert id(llama.config) not in attention._before  # others of this process may have loans


@pytest.mark.parametrize("before", ["sdpa", None])
def test_a_copy_made_while_a_cache_lives_has_the_attention_of_before(llama, before):
    llama.config._attn_implementation = before
    cache = CompressedCache(llama, "none")
    for other in (pickle.loads(pickle.dumps(llama)), copy.deepcopy(llama)):
        assert other.config._attn_implementation == before
        assert type(other.config._attn_implementation) is type(before)
    assert llama.config._attn_implementation == "kvpact"
    assert llama.config.to_json_string() == other.config.to_json_string()
    del cache
    assert llama.config._attn_implementation == before
