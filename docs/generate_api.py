"""Write the pages of the API reference from what the packages export, a page for each name.

Sphinx calls it before it reads the pages; they are not kept.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

FACADES = (
    "zerotune",
    "zerotune.plan",
    "zerotune.optim",
    "zerotune.platform",
    "zerotune.offload",
    "zerotune.ema",
    "zerotune.checkpoint",
    "zerotune.diffusion",
    "zerotune.diffusion.data",
    "zerotune.training",
)
"""Every documented package that lists what it exports."""
BELOW = {
    "zerotune.backend": (
        "engine.Engine",
        "deepspeed.engine.DeepSpeedEngine",
        "plain.PlainEngine",
        "stream.engine.StreamEngine",
        "deepspeed.external.AttachedEngine",
        "master_weights.MasterWeights",
    ),
    "zerotune.builder": ("app.create_app",),
    "zerotune.errors": (),
    "zerotune.plan": ("charts.plot_memory", "read.SHORT_NAMES"),
    "zerotune.diffusion": ("models.probe.probe",),
}
"""Names that are documented where they are, by package."""


def homes() -> dict[str, list[str]]:
    """Public paths of each exported object: where its page is, then the others."""
    elsewhere = {f"{package}.{name}" for package, names in BELOW.items() for name in names}
    found: dict[tuple[str, int], list[str]] = {}
    for package in FACADES:
        module = importlib.import_module(package)
        for name in module.__all__:
            if name == "__version__":
                continue
            value = getattr(module, name)
            # Constants of equal value may be one object, and one object have two names.
            paths = found.setdefault((name, id(value)), [])
            own = f"{getattr(value, '__module__', '')}.{name}"
            if not paths and (own in elsewhere or own.startswith("zerotune.errors.")):
                paths.append(own)
            paths.append(f"{package}.{name}")
    return {paths[0]: paths[1:] for paths in (sorted(each, key=_rank) for each in found.values())}


def _rank(path: str) -> tuple[bool, bool, str]:
    """What stands before the names of scripts: an object's own place, then its own package."""
    package = path.rpartition(".")[0]
    home = getattr(_value(path), "__module__", "") or ""
    return package not in (home, *FACADES[1:]), not home.startswith(package), path


def write(folder: Path) -> None:
    """Write all pages into ``folder``; those that are as they were are not read again."""
    folder.mkdir(parents=True, exist_ok=True)
    written = dict(_pages())
    for name, text in written.items():
        page = folder / name
        if not page.exists() or page.read_text() != text:
            page.write_text(text)
    for page in folder.iterdir():
        if page.name not in written:
            page.unlink()


def _pages() -> Iterator[tuple[str, str]]:
    """The file's name and the text of each page."""
    pages = homes()
    of_package: dict[str, list[str]] = {name: [] for name in (*FACADES, *BELOW)}
    for package, names in BELOW.items():
        pages |= {path: pages.get(path, []) for path in (f"{package}.{name}" for name in names)}
    for path, aliases in pages.items():
        of_package[_package_of(path)].append(path)
        if _package_of(path) == "zerotune.errors":
            continue
        yield f"{path}.md", _page(path, aliases)
    for package, paths in of_package.items():
        own = {
            alias: path
            for path, names in pages.items()
            for alias in names
            if alias.rpartition(".")[0] == package
        }
        yield f"{package}.md", _package(package, sorted(paths, key=_last), own)
    yield "index.md", _index(tuple(of_package))


def _package_of(path: str) -> str:
    return max((one for one in (*BELOW, *FACADES) if path.startswith(f"{one}.")), key=len)


def _last(path: str) -> str:
    return path.rpartition(".")[2].lower()


def _value(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _directive(path: str) -> str:
    value = _value(path)
    if inspect.isclass(value):
        return "autoclass"
    return "autofunction" if inspect.isfunction(value) else "autodata"


def _made_in(package: str, name: str) -> str:
    """The module that makes what a package exports, as the packages' stubs say."""
    stub = Path(importlib.import_module(package).__file__ or "").with_suffix(".pyi")
    for node in ast.parse(stub.read_text()).body if stub.exists() else ():
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return _made_in(node.module or "", name)
    return package


def _page(path: str, aliases: list[str]) -> str:
    kind = _directive(path)
    package = _package_of(path)
    # Not in the tree of pages: the theme writes the whole tree beside each page.
    lines = ["---", "orphan: true", "---", f"[{package}]({package}.md)", ""]
    lines += [f"# {path.rpartition('.')[2]}", "", "```{eval-rst}", f".. {kind}:: {path}"]
    if kind == "autodata":
        # What a constant is says the line below it, where it is made.
        package, _, name = path.rpartition(".")
        made = f"{_made_in(package, name)}.{name}"
        lines[-1] = f".. autodata:: {made}"
        aliases = [alias for alias in (path, *aliases) if alias != made]
    if kind == "autoclass":
        lines += ["   :members:", "   :inherited-members: Section, Exception, dict, tuple, Module"]
    # As data, so that a class of this name is one and not several to what links to it.
    for alias in aliases:
        lines += _same(alias)
    return "\n".join([*lines, "```", ""])


def _same(alias: str) -> list[str]:
    return ["", f".. py:data:: {alias}", "", "   The same."]


def _package(package: str, paths: list[str], aliases: dict[str, str]) -> str:
    module = importlib.import_module(package)
    head = [f"# {package}", "", (inspect.getdoc(module) or "").replace("``", "`"), ""]
    if package == "zerotune.errors":
        # Before the module, inside which a name would be taken for one of its own.
        lines = [line for path in paths for alias in homes()[path] for line in _same(alias)]
        lines = [*head[:2], "```{eval-rst}", *lines, "", ".. automodule:: zerotune.errors"]
        lines.append("   :members:")
        return "\n".join([*lines, "```", ""])
    rows = [(path.rpartition(".")[2], path) for path in paths]
    rows += [(alias.rpartition(".")[2], path) for alias, path in aliases.items()]
    rows.sort(key=lambda row: row[0].lower())
    table = [
        f"| [{name}]({path if _package_of(path) != 'zerotune.errors' else 'zerotune.errors'}.md)"
        f" | {_first_sentence(path)} |"
        for name, path in rows
    ]
    return "\n".join([*head, "| | |", "|---|---|", *table, ""])


def _first_sentence(path: str) -> str:
    value = _value(path)
    described = inspect.isclass(value) or inspect.isfunction(value)
    text = inspect.getdoc(value) or "" if described else _below(path)
    words = " ".join(text.split("\n\n")[0].split())
    return words.replace("``", "`").replace("|", "\\|")


def _below(path: str) -> str:
    """What stands below a constant, where it is made."""
    from sphinx.pycode import ModuleAnalyzer

    package, _, name = path.rpartition(".")
    analyzer = ModuleAnalyzer.for_module(_made_in(package, name))
    return "\n".join(analyzer.find_attr_docs().get(("", name), []))


def _index(packages: tuple[str, ...]) -> str:
    def summary(package: str) -> str:
        text = inspect.getdoc(importlib.import_module(package)) or ""
        return text.split("\n\n")[0].replace("\n", " ").replace("``", "`")

    rows = [f"| [{package}]({package}.md) | {summary(package)} |" for package in packages]
    return "\n".join(
        [
            "# API",
            "",
            "Every name that a script may use, by package, a page each. What most scripts need is",
            "in `zerotune` itself.",
            "",
            "| | |",
            "|---|---|",
            *rows,
            "",
            *("```{toctree}", ":hidden:", "", *packages, "```", ""),
        ]
    )


def missing(listed: Container[str]) -> list[str]:
    """Public paths that are not ``listed``, the names that have an entry."""
    every = [path for home, aliases in homes().items() for path in (home, *aliases)]
    return sorted(path for path in every if path not in listed)


def _entries(inventory: Path) -> set[str]:
    from sphinx.util.inventory import InventoryFile

    with inventory.open("rb") as file:
        loaded = InventoryFile.load(file, "", lambda _uri, location: location)
    return {name for kind, names in loaded.items() if kind.startswith("py:") for name in names}


if __name__ == "__main__":
    left_out = missing(_entries(Path(sys.argv[1])))
    sys.exit(f"public names without an entry: {', '.join(left_out)}" if left_out else 0)
