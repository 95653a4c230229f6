"""Lets the tests here import `compare`, which is a script as well."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
