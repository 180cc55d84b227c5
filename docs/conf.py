"""Sphinx configuration; warnings are errors in the docs session."""

from __future__ import annotations

import zerotune

project = "zerotune"
author = "the zerotune developers"
release = zerotune.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
]
# Tables beside the results are in the performance page already.
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"zerotune {release}"
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_mock_imports: list[str] = []
napoleon_google_docstring = True
napoleon_use_ivar = True
# Types of torch and of private modules have no page to link to.
nitpicky = False
