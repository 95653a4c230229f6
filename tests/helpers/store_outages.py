"""What a store on a server does while the server is away."""

import threading

import pytest

from kvpact.errors import StoreUnavailable
from kvpact.stores import StoreWarning


def every_call_fails_gently(store, reason="does not answer"):
    """Reads are misses with a warning, all else is an error, and both say why."""
    warned = f"{reason}.*taken as a miss"
    with pytest.warns(StoreWarning, match=warned):
        assert store.get("a") is None
    with pytest.warns(StoreWarning, match=warned):
        assert "a" not in store
    with pytest.warns(StoreWarning, match=warned):
        stats = store.stats()
    assert stats.entries is None and stats.bytes is None and stats.errors >= 3
    for call in (lambda: store.put("a", b"2"), lambda: store.delete("a"), lambda: list(store)):
        with pytest.raises(StoreUnavailable, match=reason):
            call()


def killed_in_the_middle_of_puts(store, server):
    """Kill a server while a `BackgroundStore` writes, start it again; return what was put."""
    blobs = {f"k{i}": bytes([i]) * 300_000 for i in range(60)}
    begun = threading.Event()

    def put():
        for number, (key, blob) in enumerate(blobs.items()):
            store.put(key, blob)
            if number == 20:
                begun.set()

    thread = threading.Thread(target=put)
    thread.start()
    assert begun.wait(60)
    server.kill()
    thread.join(60)
    assert not thread.is_alive()
    with pytest.raises(StoreUnavailable, match=r"writes? failed in the background"):
        store.flush()
    assert server.start()
    return blobs
