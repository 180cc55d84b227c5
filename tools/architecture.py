"""Write the figures and arrows of docs/architecture.md: ``python -m tools.architecture``.

The figures are the size of the package. The arrows are the import directions that pyproject.toml's
contracts allow.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import zerotune

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGE: Final = Path(zerotune.__file__).parent
PAGE: Final = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- {}: written by python -m tools.architecture -->", "<!-- end of {} -->"
INSIDE_PLAN: Final = (
    "Inside the plan: values below, what works on them above, plans with their verbs on top"
)


def layers(contract: str) -> list[list[str]]:
    """Return the modules of a contract by layer, the highest layer first."""
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (found,) = (
        one for one in settings["tool"]["importlinter"]["contracts"] if one["name"] == contract
    )
    return [
        [name.strip(" ()").rpartition(".")[2] for name in layer.split("|")]
        for layer in found["layers"]
    ]


def arrows() -> str:
    """Return the import directions inside ``plan/``, from the lowest layer up."""
    return " ← ".join(
        f"`{names[0]}`" if len(names) == 1 else f"{{{', '.join(f'`{name}`' for name in names)}}}"
        for names in reversed(layers(INSIDE_PLAN))
    )


def size() -> tuple[int, int]:
    """Return the numbers of files and of non-blank lines in the package."""
    texts = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]
    return len(texts), sum(bool(line.strip()) for text in texts for line in text.splitlines())


def figures() -> str:
    """Return the page's table; lines in thousands, since they change with every commit."""
    files, lines = size()
    rows = ["| | |", "|---|--:|", f"| files | {files} |"]
    rows += [f"| lines that are not blank, thousands | {lines / 1000:.0f} |"]
    return "\n".join(rows)


def block(text: str, name: str) -> str:
    """Return the text between the marks of a name."""
    _, _, rest = text.partition(BEGIN.format(name))
    return rest.partition(END.format(name))[0].strip()


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, content in (("arrows", arrows()), ("figures", figures())):
        begin, end = BEGIN.format(name), END.format(name)
        within = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
        text = within.sub(lambda _, new=f"{begin}\n\n{content}\n\n{end}": new, text)
    PAGE.write_text(text, encoding="utf-8")
    print(figures())


if __name__ == "__main__":
    main()
