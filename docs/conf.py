"""How the documentation is built: ``nox -s docs``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "veloxquant"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "veloxquant_docs"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
exclude_patterns = ["_build", "_extensions"]
myst_heading_anchors = 4
html_title = "veloxquant"
napoleon_google_docstring = True
autodoc_typehints = "none"
autodoc_member_order = "bysource"
nitpicky = False
