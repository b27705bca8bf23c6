"""How the documentation is built: ``nox -s docs``."""

project = "veloxquant"
extensions = ["myst_parser"]
html_theme = "furo"
exclude_patterns = ["_build"]
myst_heading_anchors = 4
html_title = "veloxquant"
