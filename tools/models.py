"""Fill src/kvpact/data/models.json: what the cache of each model holds, and what slots take.

    python tools/models.py

The file's ``sources`` and each model's ``hub``, ``source`` and ``config`` are written by hand:
the fields of its published configuration that a cache depends on. From these, `layer_shapes` finds
the layers, and the codecs of `sizes.SPECS` tell the bytes of their slots, so that `kvpact size`
knows a model without transformers and torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from kvpact.cache import cache_specs, stream_facts
from kvpact.geometry import CacheGeometry
from kvpact.integrations.layer_shape import LayerShape
from kvpact.integrations.sizes import SPECS
from kvpact.integrations.transformers.layers.shapes import layer_shapes

PATH = Path(__file__).parents[1] / "src" / "kvpact" / "data" / "models.json"


def shapes_of(model: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the cache of each layer holds, without the fields that are as by default."""
    config = AutoConfig.for_model(**model["config"])
    default = LayerShape("", False)._asdict() | {"kind": None, "compressed": None}
    found = [x._asdict() for x in layer_shapes(config, torch.bfloat16)]
    return [{name: x for name, x in each.items() if x != default[name]} for each in found]


def widths_of(models: dict[str, Any]) -> list[tuple[int, int, bool]]:
    """Return widths of K and V of all compressed layers, and whether they are latents."""
    kinds = [x for model in models.values() for x in model["kinds"] if x["compressed"]]
    return sorted({(x["key_dim"], x["value_dim"], x.get("latent", False)) for x in kinds})


def slots_of(spec: str, k: int, v: int, latent: bool) -> list[list[float]]:
    """Return `StreamFacts` of K and V at these widths; the state's bytes are those of one head."""
    geometry = CacheGeometry(1, 1, k, v, torch.bfloat16, latent)
    return [list(facts) for facts in stream_facts(cache_specs(spec, geometry)[0], geometry)]


def filled(written: dict[str, Any]) -> dict[str, Any]:
    """Return the document with what follows from what is written by hand."""
    models = {}
    for name, model in written["models"].items():
        shapes = shapes_of(model)
        kinds = [x for at, x in enumerate(shapes) if x not in shapes[:at]]
        order = "".join(str(kinds.index(x)) for x in shapes)
        models[name] = {**model, "kinds": kinds, "order": order}
    slots = {
        spec: {f"{k},{v},{latent:d}": slots_of(spec, k, v, latent) for k, v, latent in widths}
        for widths in (widths_of(models),)
        for spec in SPECS
    }
    return {"sources": written["sources"], "models": models, "slots": slots}


def text_of(document: dict[str, Any]) -> str:
    """Return the file: a line for each source, model, kind of layer and spec."""

    def lines(part: dict[str, Any]) -> str:
        return ",\n".join(f"{json.dumps(name)}: {json.dumps(x)}" for name, x in part.items())

    parts = (f"{json.dumps(name)}: {{\n{lines(part)}\n}}" for name, part in document.items())
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    PATH.write_text(text_of(filled(json.loads(PATH.read_text("utf-8")))), "utf-8")
    print(f"written to {PATH}")
