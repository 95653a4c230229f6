"""The documentation site: `make docs` builds it into `build/docs`."""

import sys
from pathlib import Path

import kvpact

sys.path.insert(0, str(Path(__file__).parent))

project = "kvpact"
author = "the kvpact authors"
version = release = kvpact.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "kvpact_site.commands",
    "kvpact_site.mathml",
    "kvpact_site.repository",
    "kvpact_site.breaks",
]
exclude_patterns = ["_static", "kvpact_pages", "kvpact_site"]
needs_sphinx = "9.0"

# Links to headings are checked, down to the fourth level.
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 4
highlight_language = "none"
# The notebooks are committed with their output; a slow test executes them.
nb_execution_mode = "off"
# "$ " is no part of what is copied, nor is what a command printed.
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
# "--option" and {"a", "b"} stand in sentences and tables as they are typed.
smartquotes = False

# Docstrings are numpydoc. What stands between single backticks is a name of the API where one is
# meant, and a formula or a piece of code everywhere else.
default_role = "py:obj"
napoleon_google_docstring = False
autosummary_generate = False
toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 72
# Nothing is said of names that are not on this site: torch's and transformers', and private ones.
nitpick_ignore_regex = [(r"py:.*", r".*")]

html_theme = "furo"
pygments_dark_style = "one-dark"
html_title = f"kvpact {release}"
html_static_path = ["_static"]
html_css_files = ["kvpact.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_use_index = html_domain_indices = False
html_math_renderer = "mathml"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b57a4", "color-brand-content": "#0b57a4"},
    "dark_css_variables": {"color-brand-primary": "#7db7f5", "color-brand-content": "#7db7f5"},
    "navigation_with_keys": True,
}
