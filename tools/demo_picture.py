"""Record `kvpact demo` as the README's picture, dark and light.

python tools/demo_picture.py
"""

import re
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, DIMMED_MONOKAI

from kvpact.cli import demo

STATIC = Path(__file__).parents[1] / "docs" / "_static"
THEMES = {"dark": DIMMED_MONOKAI, "light": DEFAULT_TERMINAL_THEME}


def main() -> None:
    """Record, and write both pictures."""
    console = Console(record=True, width=100, force_terminal=True, color_system="truecolor")
    demo.output_console = lambda: console
    demo.demo(tokens=1500, model="smollm2", new_tokens=40, threads=None, as_json=False)
    for name, theme in THEMES.items():
        svg = console.export_svg(title="kvpact demo", theme=theme, clear=False, unique_id="demo")
        # Fonts come from the reader's machine, nothing from elsewhere.
        svg = re.sub(r"\s*@font-face \{.*?\}\n", "", svg, flags=re.DOTALL)
        (STATIC / f"demo-{name}.svg").write_text(svg.replace("Fira Code, monospace", "monospace"))


if __name__ == "__main__":
    main()
