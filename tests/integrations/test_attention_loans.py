"""A model's attention is what it was, in whatever order caches come and go."""

import threading
import weakref

from kvpact.integrations.transformers import CompressedCache, choice


def test_a_cache_is_made_while_another_thread_frees_the_last_one(llama):
    """The one that is freed does not take the attention from the one that comes."""
    caches = [CompressedCache(llama, "none")]
    loan = weakref.ref(caches[0]._loan)
    with choice._lock:  # what is freed now gives the attention back when the lock is released
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
    assert not choice._before
