"""Who stands in the leaderboard: the packages of `leaderboard_peers`, and those of entry points."""

import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from leaderboard_peers import PEERS

from kvpact.errors import RegistrationError
from kvpact.evaluate import Contender
from kvpact.evaluate.contender import LEADERBOARD_GROUP

INSTALLED = Path(__file__).parents[1] / "build" / "peers"

# What can't stand in the table, and why.
LEFT_OUT = {
    "tri-tier": "no cache of transformers: it takes the place of Llama's attention, of batch 1",
    "spectralquant": "compresses a prompt once, after it was computed, and holds dense K and V",
    "aither-kvcache": "a codec and a plug-in of vLLM; it has no cache of transformers",
    "turboquantcpu": "keeps a compressed copy that no attention reads",
    "turboquant-vllm": "needs vLLM on a GPU, and Python 3.12",
    "kvpress": "drops tokens; what it keeps is exact, or QuantizedCache's, which is in the table",
}


def points() -> dict[str, EntryPoint | Contender]:
    """Return all contenders by name; nothing of other packages is imported."""
    found: dict[str, EntryPoint | Contender] = dict(PEERS)
    for point in entry_points(group=LEADERBOARD_GROUP):
        if point.name in found:
            raise RegistrationError(
                f"contender {point.name!r} of {point.value} is there already; choose another name"
            )
        found[point.name] = point
    return found


def contender(name: str) -> Contender:
    """Return a contender by name.

    Raises `RegistrationError` where nothing has that name, or what has it is no `Contender`.
    """
    known = points()
    if name not in known:
        raise RegistrationError(f"no contender {name!r}; there are {', '.join(known)}")
    point = known[name]
    found = point.load() if isinstance(point, EntryPoint) else point
    if not isinstance(found, Contender):
        raise RegistrationError(f"{point.value} is no kvpact.evaluate.Contender: {found!r}")
    return found


def installed(name: str, requires: tuple[str, ...]) -> Path | None:
    """Install what a contender requires into a folder of its own; return the folder."""
    if not requires:
        return None
    folder = INSTALLED / name
    mark, wanted = folder / "requires.txt", "\n".join(requires) + "\n"
    if not mark.is_file() or mark.read_text("utf-8") != wanted:
        print(f"installing {', '.join(requires)} …", flush=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        where = ["--target", str(folder), "--upgrade", "--no-deps"]
        subprocess.run([*pip, *where, *requires], check=True)
        mark.write_text(wanted, "utf-8")
    return folder
