"""What the documentation takes from code and committed results is what they hold now."""

import json
import re
from xml.etree import ElementTree

from kvpact_pages import by_model, cards, chart, faq, pages, stream
from kvpact_pages.pages import DOCS, PAGES
from kvpact_pages.results import NARROW

from kvpact.registry import Alias, list_methods


def test_no_page_has_drifted():
    stale = [str(path.relative_to(DOCS)) for path in pages.stale()]
    assert not stale, "run `python docs/generate.py` and commit what it writes"


def test_every_registered_method_has_a_card():
    named = {name: one for name, one in list_methods().items() if not isinstance(one, Alias)}
    own = {name for name, one in named.items() if one.__module__.startswith("kvpact.methods")}
    alone = {path.stem for path in (DOCS / "methods").glob("*.md")} - {"index", "comparison"}
    shared = re.findall(r"^## `(\w+)`$", (DOCS / "methods/comparison.md").read_text("utf-8"), re.M)
    assert alone == set(cards.OWN_PAGE)
    assert sorted([*alone, *shared]) == sorted(own) == sorted(cards.ADVICE)


def test_a_card_has_the_figures_of_the_committed_results():
    text = cards.card(cards.methods()["trellis"])
    row = next(r for r in by_model.measured("trellis") if r["spec"] == "trellis:bits=3")
    text = text.replace(NARROW, " ")
    assert f"{row['kl_mean']:.5f} ± {row['kl_se']:.5f}" in text
    assert "`trellis:bits=3` | 3.285 / 3.125 | 3.205 / 3.062" in text


def test_every_block_that_is_made_stands_on_its_page():
    for page, made in PAGES.items():
        found = pages.BLOCK.finditer((DOCS / page).read_text("utf-8"))
        assert {block["name"] for block in found} == set(made), page


def test_a_short_context_gains_little():
    # Up to the window all tokens are exact. Of 128, 64 are packed, 4 sinks are held twice.
    assert faq.share("int:bits=8", 64) == 1
    assert faq.share("int:bits=8", 128) == (64 * 128 + 64 * 8 + 68 * 256) / (128 * 256)
    assert faq.share("turboquant:bits=4", 4096) < 0.28


def test_the_drawings_are_of_what_the_cache_holds():
    given = stream.tokens(stream.HELD, seed=1)
    cache = stream.cache_of(stream.GROUPED, given)
    whole = stream.state(cache, given, stream.GROUPED, stream.HELD)
    # The window of 24 begins at 84, in the third group of 32: two groups have left it.
    assert (whole.packed, whole.tail_start, whole.exact_from) == (64, 64, 64)
    slots, tail, sinks = stream.lanes(whole).values()
    assert len(slots) == 64 and min(tail) == 64 and max(tail) == 107 and list(sinks) == [0, 1, 2, 3]
    # Another copy of the sinks is read, and of no other token.
    assert [t for t in slots if not slots[t]] == [0, 1, 2, 3]
    assert all(tail.values())


def test_a_picture_says_what_it_shows_and_is_read_on_dark_pages():
    points = {"x < y": [(1.0, 2.0), (2.0, 4.0)], "absent": []}
    drawn = chart.draw("a & b", points, {1.0: "one", 2.0: "two"}, "across", "up")
    told = [text for text in ElementTree.fromstring(drawn).itertext() if text.strip()]
    assert {"a & b", "x < y", "one", "two", "across", "up"} <= set(told) and "absent" not in told
    first, dark = chart.COLOURS[0], chart.DARK[chart.COLOURS[0]]
    assert f"stroke: {first}" in drawn and f"{{stroke:{dark}!important}}" in drawn


def test_a_row_of_others_stands_in_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(by_model, "FOLDER", tmp_path)
    assert by_model.others() == "Nobody has handed on a row yet."
    versions = {"kvpact": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0", "python": "3.12.1"}
    protocol = {"text": "book.txt", "tokens": 2305, "chunk": 256, "scored": 2048}
    row = {"model": "qwen3-8b", "spec": "fp8", "kl_mean": 0.00031, "kl_se": 0.00002, "top1": 99.1}
    row |= {"share": 0.52, "protocol": protocol | {"read": "as decoding reads"}}
    row |= {"dtype": "bfloat16", "processor": "NVIDIA L4", "threads": 4, "versions": versions}
    (tmp_path / "measured-by-others").mkdir()
    (tmp_path / "measured-by-others" / "a.json").write_text(json.dumps([row]), "utf-8")
    line = by_model.others().splitlines()[-1].replace(NARROW, " ")
    assert "`fp8` | [2,048 of book.txt, as decoding reads](" in line
    assert line.endswith("transformers 5.24.0 | 52.0 % | 0.00031 ± 0.00002 | 99.1 % |")
