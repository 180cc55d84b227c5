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
from docutils import nodes

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


def described(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Complete a docstring before napoleon reads it.

    A method's parameters are described as in the class that it overrides or implements. A colon in
    an attribute's first line does not end a type.
    """
    del app, options
    function = getattr(value, "__func__", value)
    if what == "method" and inspect.isfunction(function):
        owner = generate_api.owner_of(name.rpartition(".")[0])
        lines[:] = generate_api.with_arguments(owner, function, "\n".join(lines)).splitlines()
    elif what in ("attribute", "data", "property"):
        # napoleon looks for a type in the first line only: an empty comment has none.
        lines[:0] = ["..", ""]


def undescribed_removed(app: Any, domain: str, kind: str, content: Any) -> None:
    """Remove a class's parameters without words: fields of attrs classes are also attributes."""
    del app, domain
    if kind != "class":
        return
    fields = [each for each in content.findall(nodes.field) if each.parent.parent is content]
    named = {each: each[0].astext().partition(" ")[::2] for each in fields}
    wordless = {
        name for each, (role, name) in named.items() if role == "param" and each[1].astext() == ""
    }
    for each, (role, name) in named.items():
        if role in ("param", "type") and name in wordless:
            each.parent.remove(each)


def setup(app: Any) -> None:
    """Register the handlers; the pages of the API are written before Sphinx reads pages."""
    # Before napoleon, which turns sections into fields.
    app.connect("autodoc-process-docstring", described, priority=400)
    # After the theme's handler, which creates the navigation.
    app.connect("html-page-context", accessible, priority=900)
    # After autodoc's own, which adds the parameters' types.
    app.connect("object-description-transform", undescribed_removed, priority=900)
    app.connect("builder-inited", lambda app: generate_api.write(Path(app.srcdir) / "api"))
