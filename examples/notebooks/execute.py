"""Execute notebooks of this folder anew and write what they print and draw: all, or those named.

python examples/notebooks/execute.py [NOTEBOOK.ipynb …]
"""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

FOLDER = Path(__file__).parent
# tqdm would like to draw its bars by ipywidgets.
ENVIRONMENT = {"PYTHONWARNINGS": "ignore:IProgress not found"}


def notebooks():
    """Return the paths of all notebooks, in the order of their names."""
    return sorted(FOLDER.glob("*.ipynb"))


def executed(path):
    """Return a notebook with the outputs of a fresh kernel; nothing is written.

    What differs from machine to machine (versions, times) is left out of its metadata.
    """
    notebook = nbformat.read(path, as_version=4)
    with TemporaryDirectory() as sockets:  # files, so that no port is opened
        own = {"transport": "ipc", "ip": str(Path(sockets) / "kernel")}
        NotebookClient(
            notebook,
            config=Config({"KernelManager": own}),
            kernel_name="python3",
            timeout=600,
            startup_timeout=120,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(FOLDER)}},
        ).execute(env={**os.environ, **ENVIRONMENT})
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    nbformat.validate(notebook)
    return notebook


if __name__ == "__main__":
    for name in sys.argv[1:] or notebooks():
        nbformat.write(executed(name), name)
        print(f"wrote {name}")
