"""Blocks of code in the documentation, and the names that its Python blocks are given."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tiny_llama import ascii_tokenizer, tiny_llama

import kvpact
from kvpact.testing.data import by_name

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
PAGES.sort(key=lambda path: path.relative_to(ROOT).as_posix())
_OPENS = re.compile(r"( *)(`{3,})(.*)")
_NEEDS = re.compile(r" *<!-- needs: ([\w ,]+) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block: language, text and line, and what ``<!-- needs: … -->`` before it says."""

    language: str
    code: str
    line: int
    needs: str


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in their order."""
    lines = page.read_text("utf-8").splitlines()
    found, start = [], 0
    while start < len(lines):
        if opens := _OPENS.fullmatch(lines[start]):
            indent, fence, language = opens.groups()
            end = lines.index(indent + fence, start + 1)
            code = "".join(f"{line.removeprefix(indent)}\n" for line in lines[start + 1 : end])
            needs = _NEEDS.fullmatch(lines[start - 1]) if start else None
            found.append(Block(language, code, start + 1, needs[1] if needs else ""))
            start = end
        start += 1
    return found


def name_of(page: Path) -> str:
    """Return a page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def given(folder: Path) -> dict[str, Any]:
    """Return the names that a page's first block may use; a model is saved in the folder."""
    from transformers import BatchEncoding

    from kvpact.integrations.transformers import calibrate

    model, draft = tiny_llama(512), tiny_llama(512)
    ids = torch.arange(1, 101)[None] % 120
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder / "model")
    ascii_tokenizer().save_pretrained(folder / "model")
    model.name_or_path = str(folder / "model")  # as of one that was loaded from there
    texts = [torch.arange(128 * 2) * 7 % 120]
    specs = [kvpact.parse_spec("pca:bits=1.5"), kvpact.parse_spec("trellis:bits=4")]
    calibrate(model, texts, specs).save(folder / "smollm2.calibration")
    inputs = BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    names = {"model": model, "draft": draft, "name": str(folder / "model"), "inputs": inputs}
    return {**names, **_tokens(), **_latents(), **_caches()}


def _tokens() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(2, heads, 200, 64, generator=draw) for heads in (3, 3, 9))
    return {
        "layer": 0,
        "geometry": kvpact.CacheGeometry(num_layers=2, num_kv_heads=3, head_dim=64),
        **{"k": k, "v": v, "q": q, "key": k[0, :, 0].flatten(), "value": v[0, :, 0].flatten()},
        # The same of one row.
        **{"keys": k[:1], "values": v[:1], "queries": q[:1]},
        "token_ids": list(range(200)),
    }


def _latents() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(1)
    shapes = {
        **{"c_kv": (1, 1, 5, 512), "k_rope": (1, 1, 5, 64)},
        **{"q_nope": (1, 4, 5, 32), "q_rope": (1, 4, 5, 64)},
        **{"w_uk": (4, 32, 512), "w_uv": (4, 32, 512)},
    }
    return {name: torch.randn(*shape, generator=draw) for name, shape in shapes.items()}


def _caches() -> dict[str, Any]:
    geometry = kvpact.CacheGeometry(2, 3, 64, dtype=torch.float32)
    pool = kvpact.PagedKVCache("turboquant:bits=4", geometry, num_pages=32)
    seq, other = pool.allocate(), pool.allocate()
    draw = torch.Generator().manual_seed(2)
    tokens = [torch.randn(1, heads, 40, 64, generator=draw) for heads in (3, 3, 9)]
    pool.view([seq]).attend(0, **by_name(*tokens))
    held = kvpact.create_cache("turboquant:bits=4", geometry)
    for layer in range(2):
        held.attend(layer, **by_name(*tokens))
    return {"pool": pool, "seq": seq, "other": other, "engine_cache": held}
