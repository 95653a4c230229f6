"""Print what kvpact and some of its extras ask for, so that it can be installed before kvpact is.

python tools/extras.py EXTRA …
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
wanted = [*project["dependencies"], *(one for name in sys.argv[1:] for one in extras[name])]
print(*(one for one in wanted if not one.startswith("kvpact[")), sep="\n")
