"""Sphinx configuration; warnings are errors in the docs session."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import zerotune

sys.path.insert(0, str(Path(__file__).parent))

import generate_api

project = "zerotune"
author = "the zerotune developers"
release = zerotune.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_theme_options = {
    "source_repository": "https://github.com/zerotune/zerotune/",
    "source_branch": "main",
    "source_directory": "docs/",
    "footer_icons": [
        {
            "name": "Repository",
            "url": "https://github.com/zerotune/zerotune",
            "html": "<span>Repository</span>",
            "class": "",
        }
    ],
}
# A console's prompt and what it answers are not copied.
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
html_title = f"zerotune {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["scrolling.js"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_mock_imports: list[str] = []
napoleon_google_docstring = True
napoleon_use_ivar = True
# Types of torch and of private modules have no page to link to.
nitpicky = False


def setup(app: Any) -> None:
    """Write the pages of the API before pages are read."""
    app.connect("builder-inited", lambda app: generate_api.write(Path(app.srcdir) / "api"))
