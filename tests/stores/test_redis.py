"""RedisStore on a real server: the conformance class, and everything that servers do to one."""

import datetime
import hashlib
import ipaddress
import socket

import pytest
from store_outages import every_call_fails_gently, killed_in_the_middle_of_puts

from kvpact.errors import StoreError, StoreFull, StoreUnavailable
from kvpact.stores import BackgroundStore, RedisStore, StoreWarning, open_store
from kvpact.testing import StoreContract


@pytest.fixture(scope="module")
def server(tmp_path_factory, start_server):
    server = start_server(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def own_server(tmp_path, start_server):
    """One that a test may kill."""
    server = start_server(tmp_path)
    yield server
    server.kill()


def connect(server, **options):
    settings = {"password": server.password, "timeout": 5.0, "retry_after": 0.0} | options
    return RedisStore(server.url, **settings)


class TestRedisStore(StoreContract):
    examples, steps = 15, 15

    @pytest.fixture(autouse=True)
    def _server(self, server):
        type(self).server = server

    def make_store(self, place, **options):
        prefix = f"kvpact:{hashlib.sha256(str(place).encode()).hexdigest()[:20]}:"
        return connect(self.server, prefix=prefix, **options)

    def tamper(self, store, key, edit):
        name = store._prefix + key
        store._client.set(name, edit(store._client.get(name)))


def test_prefixes_are_apart(server):
    with connect(server, prefix="one:") as one, connect(server, prefix="two:") as two:
        one.put("a", b"1")
        assert two.get("a") is None and list(two) == []
        two.put("a", b"2")
        assert one.get("a") == b"1" and one.delete("a") and two.get("a") == b"2"


def test_keys_of_others_below_the_prefix_are_left_alone(server):
    """Another store's with a longer prefix, and an application's of any type."""
    with connect(server, prefix="mine:") as one, connect(server, prefix="mine:b:") as two:
        one.put("a", b"1")
        two.put("b", b"2")
        client = one._client
        client.set("mine:no key", "text")
        client.set(b"mine:\xff", "text")
        client.lpush("mine:list", 1)
        client.hset("mine:hash", "field", 1)
        others = {key: client.dump(key) for key in client.keys("mine:*") if key != b"mine:a"}
        assert len(others) == 5
        assert list(one) == ["a"] and list(two) == ["b"]
        stats = one.stats()
        assert stats.entries == 1 and stats.bytes == client.strlen("mine:a")
        one._client.set("mine:c", "damaged")
        report = one.gc(verify=True)
        assert report.damaged == 1 and report.freed == len("damaged")
        assert {key: client.dump(key) for key in others} == others
        assert one.get("a") == b"1" and two.get("b") == b"2"


def test_the_server_drops_old_entries(server):
    with connect(server, prefix="ttl:", ttl=100.0) as store:
        store.put("a", b"1")
        assert 90_000 < store._client.pttl("ttl:a") <= 100_000
    with connect(server, prefix="ttl:", ttl=100.0, clock=lambda: 4e9) as store:
        assert store.get("a") is None and "a" not in store


def test_a_wrong_password_is_named_at_once(server):
    for password in ("wrong", None):
        with pytest.raises(StoreUnavailable, match="refuses user or password") as raised:
            connect(server, password=password)
        assert server.password not in str(raised.value)


def test_a_password_in_the_url_is_never_shown(server):
    url = server.url.replace("://", f"://:{server.password.replace(' ', '%20')}@")
    with open_store(url) as store:
        store.put("a", b"1")
        assert store.get("a") == b"1"
        assert "horse" not in repr(store) and str(server.port) in repr(store)


def test_a_password_changed_meanwhile_is_a_miss(own_server):
    with connect(own_server) as store:
        store.put("a", b"1")
        store._client.config_set("requirepass", "another")
        store._client.connection_pool.disconnect()
        with pytest.warns(StoreWarning, match="refuses user or password"):
            assert store.get("a") is None
        with pytest.raises(StoreUnavailable, match="refuses user or password"):
            store.put("a", b"2")


def test_a_server_killed_and_started_again(own_server):
    with connect(own_server) as store:
        store.put("a", b"1")
        assert store.get("a") == b"1"
        own_server.kill()
        every_call_fails_gently(store)
        assert own_server.start()
        assert store.get("a") == b"1", "it was stored with appendfsync always"
        store.put("a", b"2")
        assert store.get("a") == b"2"


def test_a_server_killed_in_the_middle_of_puts(own_server):
    """Every entry that can be read afterwards is right; failed writes are named and counted."""
    store = BackgroundStore(connect(own_server), max_pending=4)
    blobs = killed_in_the_middle_of_puts(store, own_server)
    found = {key: store.get(key) for key in blobs}
    assert all(blob in (None, blobs[key]) for key, blob in found.items())
    assert found["k0"] == blobs["k0"] and None in found.values()
    assert store.stats().damaged == 0
    store.close()


def test_a_server_that_stands_still_is_no_hang(own_server):
    with connect(own_server, timeout=0.1) as store:
        store.put("a", b"1")
        with own_server.frozen():
            every_call_fails_gently(store)
            with pytest.warns(StoreWarning, match="taken as a miss"):
                connect(own_server, timeout=0.1).close()
        with connect(own_server) as again:
            assert again.get("a") == b"1"


def test_a_server_that_is_away_costs_one_timeout():
    """It accepts and says nothing; for a while nobody asks it again."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(0)
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.warns(StoreWarning, match="taken as a miss"):
            store = RedisStore(url, timeout=0.05, retry_after=3600)
        asked = connections(silent)
        assert asked >= 1
        with store, pytest.warns(StoreWarning, match="does not answer"):
            for index in range(100):
                assert store.get(f"k{index}") is None
            with pytest.raises(StoreUnavailable):
                store.put("a", b"1")
        assert connections(silent) == 0


def connections(listener):
    count = 0
    while True:
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1


def test_a_server_without_room_refuses_and_serves(own_server):
    with connect(own_server) as store:
        store.put("a", b"1")
        store._client.config_set("maxmemory", "1")
        with pytest.raises(StoreFull, match="maxmemory"):
            store.put("b", b"2")
        assert store.get("a") == b"1" and "b" not in store
        store._client.config_set("maxmemory", "0")
        store.put("b", b"2")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def make(folder):
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kvpact test")])
        now = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        hour, number = datetime.timedelta(hours=1), x509.random_serial_number()
        builder = x509.CertificateBuilder(
            name, name, key.public_key(), number, now - hour, now + hour
        )
        builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
        builder = builder.add_extension(x509.BasicConstraints(True, 0), critical=True)
        pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
        files = {"cert": folder / "cert.pem", "key": folder / "key.pem"}
        files["cert"].write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(pem))
        form = serialization.PrivateFormat.PKCS8
        files["key"].write_bytes(key.private_bytes(pem, form, plain))
        return files

    return make(tmp_path_factory.mktemp("good")), make(tmp_path_factory.mktemp("other"))


def test_tls_and_certificates_are_checked(certificate, tmp_path, start_server):
    good, other = certificate
    server = start_server(tmp_path, tls=good)
    try:
        with connect(server, ca_certs=str(good["cert"])) as store:
            store.put("a", b"1")
            assert store.get("a") == b"1"
        for options in ({"ca_certs": str(other["cert"])}, {}):
            told = pytest.warns(StoreWarning, match=r"(?i)certificate")
            with told, connect(server, **options) as store:
                assert store.get("a") is None
        with pytest.warns(StoreWarning, match="taken as a miss"):  # without TLS
            url = server.url.replace("rediss", "redis")
            RedisStore(url, password=server.password, timeout=5.0).close()
    finally:
        server.kill()


@pytest.mark.parametrize(("url", "options"), [
    ("http://localhost", {}), ("redis://localhost", {"prefix": "a*"}),
    ("redis://localhost", {"timeout": 0}), ("redis://localhost", {"ca_certs": "x.pem"}),
    ("redis://localhost:notaport", {}), ("redis://localhost?nonesuch=1", {}),
])  # fmt: skip
def test_bad_options_are_named(url, options):
    with pytest.raises(StoreError):
        RedisStore(url, **options)


@pytest.mark.parametrize("url", [
    "redis://:hunter#2secret@host:6379", "redis://:6379#2secret@host",
    "redis://user:hunter/2secret@host", "redis://user:6379/2secret@host",
    "redis://user:hunter?2secret@host:1", "redis://:hunter2secret@host:abc",
    "redis://[hunter2secret@host",
])  # fmt: skip
def test_a_url_that_a_password_has_cut_is_not_shown(url):
    with pytest.raises(StoreError, match=r"%23.*password=") as raised:
        RedisStore(url, timeout=0.01)
    assert "hunter" not in str(raised.value) and "secret" not in str(raised.value)
    # Nor by a traceback.
    error = raised.value
    assert error.__cause__ is None and (error.__context__ is None or error.__suppress_context__)


@pytest.mark.parametrize("query", [
    "ssl_cert_reqs=none", "ssl%5Fcheck_hostname=false", "db=0&socket_timeout=9999", "ssl_ca_certs",
])  # fmt: skip
def test_a_url_does_not_override_arguments(query):
    with pytest.raises(StoreError, match=r"ssl_... or socket_...; give"):
        RedisStore(f"rediss://127.0.0.1:1?{query}", timeout=0.01)
