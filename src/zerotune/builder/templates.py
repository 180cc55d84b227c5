"""Templates: named forms.

Each of the user's templates is a JSON file in the user's configuration directory. A built-in
template names a model and a machine; ``advise`` creates its form when the template is used.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from zerotune.builder.forms import FormState, parse_request
from zerotune.builder.models import MODEL_NAMES
from zerotune.builder.session import default_plan
from zerotune.errors import InvalidValueError, PlanConflictError, PlanFileError
from zerotune.plan.write import write_whole

FORMAT: Final = 1
_NAME_PATTERN: Final = re.compile(r"\w(?:[\w ,.()+-]{0,58}[\w)+])?")
_LONGEST_BYTES: Final = 200
_RESERVED: Final = re.compile(r"(?:con|prn|aux|nul|com\d|lpt\d)(?:\..*)?", re.IGNORECASE)
_MOST_TEMPLATES: Final = 500


@attrs.frozen(kw_only=True)
class Template:
    """A named form."""

    name: str
    state: FormState
    description: str = ""

    def data(self) -> dict[str, Any]:
        """Return the template as a JSON-serialisable dict."""
        return {
            "zerotune_template": FORMAT,
            "name": self.name,
            "description": self.description,
            "state": self.state.data(),
        }


def user_folder() -> Path:
    """Return the folder for the user's templates, in ``XDG_CONFIG_HOME`` or ``~/.config``."""
    base = os.environ.get("XDG_CONFIG_HOME")
    home = Path(base) if base and Path(base).is_absolute() else Path.home() / ".config"
    return home / "zerotune" / "templates"


def normalise_name(name: Any) -> str:
    """Check and normalise a template's name, so that every system accepts it as a file name."""
    plain = unicodedata.normalize("NFC", name).strip() if isinstance(name, str) else ""
    good = _NAME_PATTERN.fullmatch(plain) and not _RESERVED.fullmatch(plain)
    if not good or len(plain.encode("utf-8", "replace")) > _LONGEST_BYTES:
        raise InvalidValueError(
            "is not a valid template name",
            key="name",
            value=name,
            fix="write letters, digits, spaces and , . ( ) + - _, and begin with a letter or digit",
        )
    return plain


class TemplateStore:
    """A folder of templates."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = user_folder() if folder is None else folder

    def all(self) -> list[Template]:
        """Return every readable template, sorted by name."""
        found = []
        for path in self._files():
            try:
                found.append(_read_stored(path))
            except (InvalidValueError, PlanFileError):
                continue  # Not a template; reporting it would not help the user of the page.
        return sorted(found, key=lambda template: template.name.casefold())

    def get(self, name: Any) -> Template:
        """Return a template by its name."""
        return _read_stored(self._path_of(name))

    def put(self, template: Template) -> Template:
        """Store a template; an existing template of that name is replaced."""
        name = normalise_name(template.name)
        path = self._find(name) or self.folder / f"{name}.json"
        if not path.exists() and len(self._files()) >= _MOST_TEMPLATES:
            raise PlanConflictError(
                f"there are already {_MOST_TEMPLATES}", key="templates", fix="delete a template"
            )
        named = attrs.evolve(template, name=path.stem)
        write_whole(path, (json.dumps(named.data(), indent=2, allow_nan=False) + "\n").encode())
        return named

    def delete(self, name: Any) -> None:
        """Delete a template."""
        self._path_of(name).unlink(missing_ok=True)

    def _path_of(self, name: Any) -> Path:
        path = self._find(normalise_name(name))
        if path is None:
            raise PlanFileError(
                "is not the name of a template", key="name", value=name, fix="reload the list"
            )
        return path

    def _files(self) -> list[Path]:
        try:
            return [path for path in self.folder.glob("*.json") if path.is_file()]
        except OSError:
            return []

    def _find(self, name: str) -> Path | None:
        # Names that differ only in case are the same file on some systems, so also here.
        wanted = name.casefold()
        return next((path for path in self._files() if path.stem.casefold() == wanted), None)


def read_template(text: str, *, name: str) -> Template:
    """Parse a template from JSON text."""
    data = parse_request(text)
    if not isinstance(data, dict) or data.get("zerotune_template") != FORMAT:
        raise InvalidValueError(
            "is not a template of the builder",
            key=name,
            fix="import an exported template, or open the file as a plan",
        )
    description = data.get("description", "")
    return Template(
        name=normalise_name(data.get("name")),
        description=description if isinstance(description, str) else "",
        state=FormState.of_request(data.get("state")),
    )


def _read_stored(path: Path) -> Template:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanFileError(f"cannot be read ({error})", key=str(path), fix="remove it") from None
    template = read_template(text, name=path.name)
    # Templates are listed and deleted by file name, so it overrides the stored name.
    return attrs.evolve(template, name=path.stem)


# -- The templates that come with the builder.


@attrs.frozen(kw_only=True)
class BuiltinTemplate:
    """A template that finds the fastest plan for a model and a machine."""

    id: str
    name: str
    description: str
    group: str
    """Heading under which the page lists the template."""
    setup: Mapping[str, Any]
    """Values for ``preview.Setup``; empty to use the page's setup."""


_ON_ONE_CARD: Final = {
    "this_machine": False,
    "world_size": 1,
    "nvme": "0",
    # Clear the settings of the previous setup.
    "lora": "",
    "base_dtype": "",
    "card": "",
    "resolution": "",
    "frames": "",
}


_LORA_RANK: Final = 16


def _for_card(
    id_: str, family: str, vram: int, ram: int, kind: str = "", about: str = "", **more: Any
) -> BuiltinTemplate:
    name, group = MODEL_NAMES[family]
    return BuiltinTemplate(
        id=id_,
        name=f"{name} {kind or f'on {vram} GB'}",
        description=about or f"One {vram} GB card and {ram} GB of RAM.",
        group=group,
        setup={**_ON_ONE_CARD, "family": family, "vram": str(vram), "ram": str(ram), **more},
    )


def _for_lora(family: str, vram: int, ram: int, base: str = "") -> BuiltinTemplate:
    kind = f"LoRA of rank {_LORA_RANK} on {vram} GB"
    quantized = f", with the base model in {base}" if base else ""
    about = f"One {vram} GB card and {ram} GB of RAM{quantized}."
    more = {"lora": _LORA_RANK, "base_dtype": base}
    return _for_card(f"{family}-lora", family, vram, ram, kind, about, **more)


_FROM_NVME: Final = "from an NVMe drive"
BUILTIN: Final = (
    BuiltinTemplate(
        id="lowest",
        name="The fastest plan that fits",
        description="For the model and machine chosen on this page.",
        group="Chosen on this page",
        setup={},
    ),
    _for_card("sdxl-24", "sdxl", 24, 64),
    _for_card("sdxl-12", "sdxl", 12, 64),
    _for_card("sdxl-8", "sdxl", 8, 64),
    _for_card(
        *("nvme", "sdxl", 8, 32, _FROM_NVME),
        "8 GB card, 32 GB of RAM, 200 GB of NVMe for swap files.",
        nvme="200 GB",
    ),
    _for_card(
        *("two-gpus", "sdxl", 24, 128, "on two GPUs"),
        "Two 24 GB cards and 128 GB of RAM.",
        world_size=2,
    ),
    _for_lora("sdxl", 12, 32),
    _for_card("sd15-8", "sd15", 8, 32),
    _for_lora("sd35-large", 24, 64),
    _for_lora("flux", 16, 32, "nf4"),
    _for_lora("qwen-image", 24, 64, "nf4"),
    _for_lora("wan-14b", 48, 128),
)


def builtin_template(template_id: str) -> BuiltinTemplate:
    """Return a built-in template by its id."""
    for template in BUILTIN:
        if template.id == template_id:
            return template
    raise InvalidValueError(
        "is not the name of a template",
        key="template",
        value=template_id,
        fix=f"use one of {', '.join(template.id for template in BUILTIN)}",
    )


def starting_state(template: BuiltinTemplate, setup: Mapping[str, Any]) -> FormState:
    """Return the initial form of a template, before the plan is chosen."""
    return FormState.of_plan(default_plan(), setup={**setup, **template.setup})
