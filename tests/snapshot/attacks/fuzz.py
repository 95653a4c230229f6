"""Coverage-guided fuzzing of the snapshot reader: `make fuzz`. Needs atheris; libFuzzer's options.

Whatever a `KVPactError` does not refuse has to be restored, and to be saved to the same bytes.
"""

import importlib
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["kvpact.snapshot", "kvpact.cache.layer.states"]):
    importlib.import_module("kvpact")

sys.path.insert(0, str(Path(__file__).parent))
import small
from mend import edited, mended

from kvpact import CacheGeometry, Snapshot, create_cache
from kvpact.errors import KVPactError

SEED = small.small_snapshot().to_bytes()
EMPTY = create_cache(small.SPEC, CacheGeometry(2, 1, 4)).snapshot().to_bytes()


def one(data: bytes) -> None:
    how, data = data[:1], data[1:]
    if how > b"\xa0":
        data = mended(data)
    elif how > b"\x40":
        data = edited(SEED, data[:12])
    try:
        snapshot = Snapshot.from_bytes(data)
        assert Snapshot.from_bytes(snapshot.to_bytes()).digest == snapshot.digest
        assert snapshot.token_ids is None or snapshot.token_ids.dim() == 2
        cache = create_cache(small.SPEC, small.GEOMETRY)
        cache.restore(snapshot)
        again = cache.snapshot(page_size=snapshot.manifest.page_size)
        assert again.tokens == snapshot.tokens
        cache.prefill(0, *small.tokens(40, rows=cache.batch_size or 1))
    except KVPactError:
        return


def main() -> None:
    folder = Path(sys.argv.pop(1)) if len(sys.argv) > 1 and sys.argv[1][0] != "-" else None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate((SEED, EMPTY, b"\3\4", b"")):
            for kind in (b"\0", b"\x80", b"\xff"):
                (folder / f"seed-{number}-{kind.hex()}").write_bytes(kind + seed)
        sys.argv.append(str(folder))
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
