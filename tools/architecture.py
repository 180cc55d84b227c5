"""Write the figures and arrows of docs/architecture.md: ``python -m tools.architecture``.

The figures are the size of the package and the number of its files that a typical call runs through
(``--files`` names them). The arrows are the import directions that pyproject.toml's contracts
allow.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any, Final

import zerotune

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGE: Final = Path(zerotune.__file__).parent
PAGE: Final = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- {}: written by python -m tools.architecture -->", "<!-- end of {} -->"
GIB: Final = 1 << 30
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


@contextmanager
def entered() -> Iterator[list[str]]:
    """Collect the package's files whose functions run in the block, in all its threads."""
    files: list[str] = []

    def record(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        # Module bodies do not count: import order is not part of the path.
        if event != "call" or code.co_name == "<module>":
            return
        name = code.co_filename.removeprefix(f"{PACKAGE}{os.sep}")
        if name != code.co_filename and name not in files:
            files.append(name)

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        yield files
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # None ends it


def planning() -> dict[str, list[str]]:
    """Trace the calls that need neither torch nor DeepSpeed."""
    from zerotune.plan.families import family

    adam = {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}}
    plan = zerotune.DeepSpeedPlan.build(
        stage=2, offload="cpu", precision="bf16", micro_batch_size=1, optimizer=adam
    )
    place = {
        "platform": zerotune.Platform.synthetic("cuda", vram=24 * GIB), "model": family("sdxl"),
    }  # fmt: skip
    resolved = plan.resolve(**place)
    acts: Mapping[str, Callable[[], Any]] = {
        "choose AdamW anew": lambda: zerotune.OptimizerResolver().resolve(resolved),
        "resolve": lambda: plan.resolve(**place),
        "advise": lambda: zerotune.DeepSpeedPlan.advise("sdxl", vram="12GiB", ram="64GiB"),
    }
    journeys = {}
    # Each call runs twice; the first fills caches, and the second overwrites its result.
    for name, act in [*acts.items(), *acts.items()]:
        with entered() as journeys[name]:
            act()
    return journeys


def training() -> dict[str, list[str]]:
    """Trace starting an engine, saving and resuming, with a small model and the real DeepSpeed."""
    import torch
    from torch import nn

    journeys: dict[str, list[str]] = {}
    plan = zerotune.DeepSpeedPlan.build(stage=2, offload="cpu", precision="fp32")
    with tempfile.TemporaryDirectory() as folder:
        for path in (Path(folder, "first"), Path(folder, "again")):
            model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
            with entered() as starting:
                engine = zerotune.prepare(model=model, plan=plan)
            with engine:
                for _ in range(2):
                    engine.backward(engine.module(torch.randn(4, 8)).square().mean())
                    engine.step()
                with entered() as saving:
                    zerotune.save_checkpoint(path, engine=engine)
                with entered() as resuming:
                    zerotune.load_checkpoint(path, engine=engine)
            journeys = {"start an engine": starting, "save": saving, "resume": resuming}
    return journeys


def figures(journeys: Mapping[str, Sequence[str]]) -> str:
    """Return the page's table; lines in thousands, since they change with every commit."""
    files, lines = size()
    rows = ["| | |", "|---|--:|", f"| files | {files} |"]
    rows += [f"| lines that are not blank, thousands | {lines / 1000:.0f} |"]
    rows += [f"| files entered: {name} | {len(entries)} |" for name, entries in journeys.items()]
    return "\n".join(rows)


def block(text: str, name: str) -> str:
    """Return the text between the marks of a name."""
    _, _, rest = text.partition(BEGIN.format(name))
    return rest.partition(END.format(name))[0].strip()


def main() -> None:
    with tempfile.TemporaryFile("w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        journeys = {**planning(), **training()}
    text = PAGE.read_text(encoding="utf-8")
    for name, content in (("arrows", arrows()), ("figures", figures(journeys))):
        begin, end = BEGIN.format(name), END.format(name)
        within = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
        text = within.sub(lambda _, new=f"{begin}\n\n{content}\n\n{end}": new, text)
    PAGE.write_text(text, encoding="utf-8")
    print(figures(journeys))
    if "--files" in sys.argv:
        for name, files in journeys.items():
            print(f"\n{name}: {', '.join(files)}")


if __name__ == "__main__":
    main()
