"""The project's page at an index: absolute addresses in the README, and a check of what is shown.

    python packaging/wheel_page.py [--dist dist]

An index shows the README of a wheel without the files beside it. `prepare` makes its links and
pictures those of the repository's tag, and adds ``[project.urls]``; the address of the repository
is the one setting (``make wheels REPOSITORY=https://…``). Run as a program, this renders the page
of every wheel and names what a reader could not open.
"""

from __future__ import annotations

import argparse
import re
import sys
import zipfile
from email.parser import BytesParser
from html.parser import HTMLParser
from pathlib import Path

DIST = Path(__file__).parents[1] / "dist"
_CODE = re.compile(r"(^ *```.*?^ *```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_TARGET = re.compile(r'(\]\(|\b(?:src|srcset|href)=")(?!\w+:)([^)"\s]+)')
ABSOLUTE = ("https://", "mailto:")


def published(readme: str, repository: str, version: str) -> str:
    """Return a README whose links and pictures are those of a version's tag in the repository."""

    def address(found: re.Match[str]) -> str:
        path, kind = found[2], "raw" if found[2].endswith((".svg", ".png")) else "blob"
        path = f"README.md{path}" if path.startswith("#") else path
        return f"{found[1]}{repository}/{kind}/v{version}/{path}"

    pieces = _CODE.split(readme)
    pieces[::2] = [_TARGET.sub(address, piece) for piece in pieces[::2]]
    return "".join(pieces)


def urls(repository: str, version: str) -> str:
    """Return the table ``[project.urls]``."""
    pages = {
        "Repository": repository,
        "Documentation": f"{repository}/tree/v{version}/docs",
        "Changelog": f"{repository}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
    return "[project.urls]\n" + "".join(f'{name} = "{url}"\n' for name, url in pages.items())


def prepare(source: Path, repository: str) -> None:
    """Make the README and the metadata of unpacked sources those of the index."""
    repository = repository.rstrip("/")
    if not repository.startswith("https://"):
        sys.exit(f"the repository's address should begin with https://, not {repository!r}")
    code = (source / "src" / "kvpact" / "__init__.py").read_text("utf-8")
    version = re.findall(r'^__version__ = "(.+)"$', code, re.MULTILINE)[0]
    readme, project = source / "README.md", source / "pyproject.toml"
    readme.write_text(published(readme.read_text("utf-8"), repository, version), "utf-8")
    before = "[project.scripts]\n"
    text = project.read_text("utf-8").replace(before, f"{urls(repository, version)}\n{before}", 1)
    project.write_text(text, "utf-8")


class _Targets(HTMLParser):
    """Keeps what links and pictures of a page lead to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("href", "src", "srcset")]


def problems(wheel: Path) -> list[str]:
    """Return what a reader of a wheel's page at an index could not open, in words."""
    from markdown_it import MarkdownIt

    with zipfile.ZipFile(wheel) as packed:
        (name,) = (x for x in packed.namelist() if x.endswith(".dist-info/METADATA"))
        about = BytesParser().parsebytes(packed.read(name))
    page = _Targets()
    text = about.get_payload(decode=True).decode("utf-8")
    page.feed(MarkdownIt("commonmark").enable("table").render(text))
    relative = sorted({x for x in page.found if not x.startswith(ABSOLUTE)})
    wrong = [f"{x} is no absolute address" for x in relative]
    if not page.found:
        wrong.append("the page has no link and no picture")
    if not about.get_all("Project-URL"):
        wrong.append("the metadata has no Project-URL")
    return wrong


def main() -> None:
    """Check all wheels, and leave with 1 where a page is not one to publish."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dist", type=Path, default=DIST)
    wheels = sorted(parser.parse_args().dist.glob("kvpact-*.whl"))
    found = {wheel.name: problems(wheel) for wheel in wheels}
    wrong = [f"{name}: {problem}" for name, each in found.items() for problem in each]
    print(f"pages of {len(wheels)} wheels rendered; {len(wrong)} problems")
    if wrong or not wheels:
        remedy = "build with make wheels REPOSITORY=https://…, the address of the repository"
        sys.exit("\n".join([*wrong, f"this is no page to publish: {remedy}"]))


if __name__ == "__main__":
    main()
