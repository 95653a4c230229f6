"""The options of a Mooncake store, which need no Mooncake."""

import pytest

from kvpact.errors import StoreError
from kvpact.stores import MooncakeStore
from kvpact.stores.mooncake_url import Address, options_of

URL = "mooncake://host:1"


def test_what_is_not_said():
    options = options_of(URL)
    assert (options.master, options.admin) == (Address("host", 1), Address("host", 9003))
    assert (options.segment_size, options.buffer_size) == (0, 256 << 20)
    assert (options.hostname, options.prefix, options.timeout) == (None, "kvpact:", 5.0)


def test_options_stand_in_the_url_or_are_arguments():
    query = "segment_size=4GB&buffer_size=512MiB&admin=7&hostname=me&prefix=a:&timeout=.5"
    given = {"segment_size": 4 * 10**9, "buffer_size": "512 mib", "admin": "host:7"}
    options = options_of(f"{URL}?{query}")
    assert options == options_of(f"{URL}/", **given, hostname="me", prefix="a:", timeout=0.5)
    assert (options.segment_size, options.buffer_size) == (4 * 10**9, 512 << 20)
    assert options_of("mooncake://[::1]:9?admin=[::2]:8").admin == Address("::2", 8)
    assert str(Address("::1", 9)) == "[::1]:9" and str(Address("a", 9)) == "a:9"


@pytest.mark.parametrize(("url", "options", "message"), [
    ("mooncake://host", {}, "should be host:port"),
    ("mooncake://host:notaport", {}, "should be host:port"),
    ("mooncake://user:word@host:1", {}, "should be host:port"),
    ("mooncake://host:1/path", {}, "should be mooncake://host:port"),
    ("redis://host:1", {}, "should be mooncake://host:port"),
    (f"{URL}?nonesuch=1", {}, "known are segment_size"),
    (f"{URL}?timeout=1", {"timeout": 2.0}, "timeout is given twice"),
    (URL, {"timeout": 0}, "seconds above 0"),
    (URL, {"timeout": "soon"}, "seconds above 0"),
    (URL, {"timeout": float("nan")}, "seconds above 0"),
    (URL, {"segment_size": "4 apples"}, "or a text such as 512MiB"),
    (URL, {"segment_size": -1}, "should be bytes"),
    (URL, {"segment_size": 1000}, "should be 0, or 16777216 and more"),
    (URL, {"buffer_size": 0}, "1048576 and more"),
    (URL, {"admin": "99999"}, "should be host:port, or a port"),
    (URL, {"prefix": "a*"}, "prefix="),
    (URL, {"ttl": 0}, "ttl="),
    (URL, {"log": "/nonesuch/folder/log"}, "log=.* can't be written"),
])  # fmt: skip
def test_bad_options_are_named(url, options, message):
    with pytest.raises(StoreError, match=message):
        MooncakeStore(url, **options)
