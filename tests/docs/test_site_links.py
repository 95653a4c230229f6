"""The check of the built site finds links that lead nowhere."""

from pathlib import Path

from kvpact_site.links import faults


def _site(root: Path, body: str) -> tuple[list[str], list[str]]:
    (root / "other.html").write_text('<h1 id="here">Other</h1>')
    (root / "picture.svg").write_text("<svg/>")
    (root / "page.html").write_text(body)
    return faults(root)


def test_links_that_lead_somewhere_are_no_faults(tmp_path):
    body = (
        '<p id="top"><a href="#top">up</a> <a href="other.html#here">other</a>'
        '<img src="picture.svg"> <a href="https://example.org/a">out</a></p>'
    )
    assert _site(tmp_path, body) == ([], ["https://example.org/a"])


def test_missing_files_anchors_and_pictures_are_named(tmp_path):
    body = (
        '<a href="gone.html">a</a> <a href="other.html#gone">b</a> <a href="#gone">c</a>'
        '<img src="gone.svg"> <a href="http://example.org">d</a>'
    )
    wrong, _ = _site(tmp_path, body)
    assert wrong == [
        "page.html: '#gone' leads to no anchor",
        "page.html: 'gone.html' leads to no file",
        "page.html: 'gone.svg' leads to no file",
        "page.html: 'http://example.org' is no https address",
        "page.html: 'other.html#gone' leads to no anchor",
    ]
