"""Notebooks as Markdown: texts, code, what was printed, and pictures, as they are committed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def markdown(path: Path) -> str:
    """Return a notebook as the Markdown of a page."""
    parts = [part for cell in json.loads(path.read_text("utf-8"))["cells"] for part in _cell(cell)]
    parts.append(f"The notebook: {{download}}`{path.name} </../examples/notebooks/{path.name}>`.")
    return "\n\n".join(parts) + "\n"


def _cell(cell: dict[str, Any]) -> Iterator[str]:
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield text
        return
    yield f"```python\n{text}\n```"
    printed = "".join("".join(x["text"]) for x in cell["outputs"] if x["output_type"] == "stream")
    if printed:
        yield f"```text\n{printed.strip()}\n```"
    for output in cell["outputs"]:
        if picture := output.get("data", {}).get("image/png"):
            data = "".join(picture).replace("\n", "")
            yield f"![{cell['metadata']['alt']}](data:image/png;base64,{data})"
