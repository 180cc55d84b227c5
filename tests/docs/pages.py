"""Extract and run the code of a documentation page from top to bottom, as a reader would."""

from __future__ import annotations

import doctest
import io
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

DOCS = Path(__file__).parents[2] / "docs"
README = DOCS.parent / "README.md"
_CHECKED = re.compile(
    r"^```json\n(?P<file>.*?)^```$"
    r"|^\$ zerotune plan check ds_config\.json.*\n(?:```\n\n```text\n)?"
    r"(?P<said>ds_config\.json: .*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_DOCTEST = re.compile(r"^```\{doctest\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A reader's runs take hours; three steps on small images are enough to run the code.
_SHORTER = (
    (r"\bsteps=1[_0]*0+\b", "steps=3"),
    (r"\bepochs=\d+", "epochs=1"),
    (r"\bsteps=(30|20)\b", "steps=2"),
    (r"range\(1000\)", "range(2)"),
    (r"AspectBuckets\(\)", "AspectBuckets(area=1024, step=8)"),
    # Compiling takes minutes; tests/backend/test_compilation.py covers it.
    (r"compile=True", "compile=False"),
)


@attrs.frozen(kw_only=True)
class Block:
    """One fenced piece of code."""

    page: Path
    line: int
    code: str


def blocks(page: Path) -> Iterator[Block]:
    """Yield the Python blocks of a page, in order."""
    text = page.read_text()
    for found in _PYTHON.finditer(text):
        line = text[: found.start(1)].count("\n") + 1
        yield Block(page=page, line=line, code=found.group(1))


def sessions(page: Path) -> str:
    """Return the interpreter sessions of a page, with their output."""
    return "\n".join(_DOCTEST.findall(page.read_text()))


def failures(page: str) -> str:
    """Run a page's interpreter sessions as one; return differences from the printed output."""
    test = doctest.DocTestParser().get_doctest(sessions(DOCS / page), {}, page, page, 0)
    said = io.StringIO()
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.write)
    return said.getvalue()


def checked(page: Path) -> str:
    """Return the output of ``zerotune plan check ds_config.json`` on a page, as one line."""
    (said,) = (found["said"] for found in _CHECKED.finditer(page.read_text()) if found["said"])
    return " ".join(said.split())


def configuration() -> str:
    """Return the ``ds_config.json`` of the quickstart."""
    found = next(_CHECKED.finditer((DOCS / "quickstart.md").read_text()))
    return found["file"]


def names(*sections: str) -> str:
    """Return the code in sections of ``docs/names.md`` whose headings begin with these words."""
    text = (DOCS / "names.md").read_text()
    code = []
    for section in sections:
        (found,) = re.findall(rf"^## {section}.*?\n```python\n(.*?)^```$", text, re.M | re.S)
        # Leave the engine open: the page still uses it.
        code.append(found.replace("engine.close()\n", ""))
    return "\n".join(code)


def _short(code: str) -> str:
    for pattern, fewer in _SHORTER:
        code = re.sub(pattern, fewer, code)
    return code


def _close(scope: Mapping[str, Any]) -> None:
    for value in list(scope.values()):
        if callable(getattr(value, "close", None)) and type(value).__module__.startswith(
            "zerotune"
        ):
            value.close()
