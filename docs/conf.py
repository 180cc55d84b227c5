"""Sphinx configuration; warnings are errors in the docs session."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import zerotune

sys.path.insert(0, str(Path(__file__).parent))

import generate_api

project = "zerotune"
author = copyright = "the zerotune developers"
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
# Copy neither prompts nor output of consoles.
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
html_title = f"zerotune {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["accessible.js"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_mock_imports: list[str] = []
napoleon_google_docstring = True
napoleon_use_ivar = True
# Types of torch and of private modules have no page to link to.
nitpicky = False


def accessible(
    app: Any, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Give captions a heading level, and turn empty header cells of tables into plain cells."""
    del app, pagename, templatename, doctree
    captions = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = captions.replace(
        'role="heading"', 'role="heading" aria-level="2"'
    )
    context["body"] = re.sub(
        r'<th class="head[^"]*"><p></p></th>', '<td class="head"></td>', context.get("body", "")
    )


def described(app: Any, what: str, name: str, method: Any, options: Any, lines: list[str]) -> None:
    """Add parameters from the method that this method overrides or implements."""
    del app, options
    function = getattr(method, "__func__", method)
    if what == "method" and inspect.isfunction(function):
        owner = generate_api.owner_of(name.rpartition(".")[0])
        lines[:] = generate_api.with_arguments(owner, function, "\n".join(lines)).splitlines()


def setup(app: Any) -> None:
    """Register the handlers; the pages of the API are written before Sphinx reads pages."""
    # Before napoleon, which turns sections into fields.
    app.connect("autodoc-process-docstring", described, priority=400)
    # After the theme's handler, which creates the navigation.
    app.connect("html-page-context", accessible, priority=900)
    app.connect("builder-inited", lambda app: generate_api.write(Path(app.srcdir) / "api"))
