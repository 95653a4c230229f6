"""Every single changed bit and every length cut short of a small snapshot is refused."""

from pathlib import Path

import pytest
from by_path import module_at

from kvpact import Snapshot
from kvpact.errors import FormatError, IntegrityError

small = module_at(Path(__file__).with_name("small.py"))
REFUSED = (FormatError, IntegrityError)


@pytest.fixture(scope="module")
def data() -> bytes:
    return small.small_snapshot().to_bytes()


def test_every_flipped_bit(data: bytes):
    changed = bytearray(data)
    for place in range(len(data)):
        for bit in range(8):
            changed[place] ^= 1 << bit
            with pytest.raises(REFUSED):
                Snapshot.from_bytes(bytes(changed))
            changed[place] ^= 1 << bit
    assert Snapshot.from_bytes(bytes(changed)).tokens == small.TOKENS


def test_every_length(data: bytes):
    for length in range(len(data)):
        with pytest.raises(REFUSED):
            Snapshot.from_bytes(data[:length])


@pytest.mark.parametrize("tail", [b"\0", b" " * 8, b"\0" * 16, b"{}"])
def test_bytes_behind_the_end(data: bytes, tail: bytes):
    with pytest.raises(REFUSED):
        Snapshot.from_bytes(data + tail)


def test_a_mapped_file_is_checked_where_it_is_read(data: bytes, tmp_path: Path):
    path = tmp_path / "x.safetensors"
    pages = Snapshot.from_bytes(data).manifest.page_bytes(0)
    assert Snapshot.from_bytes(data).manifest.pages == 2
    # The last layer of the last page: the other layer is still read.
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    snapshot = Snapshot.open(path)
    assert pages
    assert snapshot.layer(0).streams is not None
    assert snapshot.layer(1, 0, 1).streams is not None
    for call in (lambda: snapshot.layer(1), snapshot.verify, lambda: Snapshot.load(path)):
        with pytest.raises(IntegrityError):
            call()
