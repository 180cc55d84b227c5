"""Templates: named forms.

Each of the user's templates is a JSON file in the user's configuration directory. A built-in
template names a model and a machine; ``advise`` creates its form when the template is used.
"""

from __future__ import annotations

import json
import os
import re
import threading
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import attrs

from zerotune.builder.forms import FormState, parse_request
from zerotune.builder.models import MODEL_NAMES
from zerotune.builder.session import default_plan, version_of, version_of_content
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
    version: str = ""
    """Version of the content; the page sends it back, so that concurrent changes are detected."""

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
    """A folder of templates; several tabs and builders may use it at the same time."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = user_folder() if folder is None else folder
        self._lock = threading.Lock()

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
        path = self._find(normalise_name(name))
        if path is None:
            raise PlanFileError(
                "is not the name of a template", key="name", value=name, fix="reload the list"
            )
        return _read_stored(path)

    def put(self, template: Template, *, version: str | None) -> Template:
        """Store a template; replace an existing template only if its version is ``version``."""
        name = normalise_name(template.name)
        with self._exclusive_access():
            path = self._find(name)
            self._check_version(path, version, name)
            if path is None and len(self._files()) >= _MOST_TEMPLATES:
                raise PlanConflictError(
                    f"there are already {_MOST_TEMPLATES}", key="templates", fix="delete a template"
                )
            return self._write(attrs.evolve(template, name=name), path)

    def rename(self, name: Any, to: Any, *, version: str | None) -> Template:
        """Rename a template."""
        old, new = normalise_name(name), normalise_name(to)
        with self._exclusive_access():
            path = self._find(old)
            template = self.get(old)
            self._check_version(path, version, old)
            taken = self._find(new)
            if taken is not None and taken != path:
                raise _name_conflict(new)
            renamed = self._write(attrs.evolve(template, name=new), None)
            if path is not None and path.stem != new:
                path.unlink(missing_ok=True)
            return renamed

    def delete(self, name: Any, *, version: str | None) -> None:
        """Delete a template."""
        plain = normalise_name(name)
        with self._exclusive_access():
            self.get(plain)
            path = self._find(plain)
            self._check_version(path, version, plain)
            if path is not None:
                path.unlink(missing_ok=True)

    def _check_version(self, path: Path | None, version: str | None, name: str) -> None:
        if path is None:
            if version:
                raise PlanConflictError(
                    "was deleted or renamed in another tab",
                    key="name",
                    value=name,
                    fix="save the form as a new template",
                )
            return
        if version is None:
            raise _name_conflict(name)
        if version_of(path) != version:
            raise PlanConflictError(
                "was changed in another tab",
                key="name",
                value=name,
                fix="load the template again, or save under another name",
            )

    def _files(self) -> list[Path]:
        try:
            return [path for path in self.folder.glob("*.json") if path.is_file()]
        except OSError:
            return []

    def _find(self, name: str) -> Path | None:
        # Names that differ only in case are the same file on some systems, so also here.
        wanted = name.casefold()
        return next((path for path in self._files() if path.stem.casefold() == wanted), None)

    def _write(self, template: Template, path: Path | None) -> Template:
        content = (json.dumps(template.data(), indent=2, allow_nan=False) + "\n").encode()
        write_whole(path or self.folder / f"{template.name}.json", content)
        return attrs.evolve(template, version=version_of_content(content))

    @contextmanager
    def _exclusive_access(self) -> Iterator[None]:
        """Lock the folder against other threads and, if the system can, other processes."""
        with self._lock:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise PlanFileError(
                    f"cannot be created ({error.strerror})",
                    key=str(self.folder),
                    fix="set XDG_CONFIG_HOME to a folder that you may write to",
                ) from error
            try:
                import fcntl
            except ImportError:  # Windows
                yield
                return
            descriptor = os.open(self.folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield
            finally:
                os.close(descriptor)


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
        content = path.read_bytes()
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanFileError(f"cannot be read ({error})", key=str(path), fix="remove it") from None
    template = read_template(text, name=path.name)
    # Templates are listed, renamed and deleted by file name, so it overrides the stored name.
    return attrs.evolve(template, name=path.stem, version=version_of_content(content))


def _name_conflict(name: str) -> PlanConflictError:
    return PlanConflictError(
        "is already the name of a template",
        key="name",
        value=name,
        fix="choose another name, or load the existing template and save it again",
    )


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
    _for_card("sd21-8", "sd21", 8, 32),
    _for_card("sd3-medium-12", "sd3-medium", 12, 64),
    _for_card("sd35-medium-12", "sd35-medium", 12, 64),
    _for_card("sd35-large-24", "sd35-large", 24, 192),
    _for_lora("sd35-large", 24, 64),
    _for_card("flux-24", "flux", 24, 256),
    _for_card(
        *("flux-nvme", "flux", 24, 64, _FROM_NVME),
        "24 GB card, 64 GB of RAM, 400 GB of NVMe for swap files.",
        nvme="400 GB",
    ),
    _for_lora("flux", 16, 32, "nf4"),
    _for_lora("flux-kontext", 24, 64, "nf4"),
    _for_lora("chroma", 16, 32, "nf4"),
    _for_lora("qwen-image", 24, 64, "nf4"),
    _for_lora("qwen-image-edit", 24, 64, "nf4"),
    _for_lora("qwen-image-edit-plus", 24, 64, "nf4"),
    _for_lora("z-image", 12, 32, "nf4"),
    _for_lora("flux2", 80, 192),
    _for_lora("flux2-klein-4b", 12, 64),
    _for_lora("flux2-klein-9b", 24, 64),
    _for_lora("krea2", 24, 64, "nf4"),
    _for_lora("aura-flow", 24, 64),
    _for_lora("hidream", 24, 64, "nf4"),
    _for_lora("lumina2", 12, 64),
    _for_card("pixart-alpha-12", "pixart-alpha", 12, 32),
    _for_card("pixart-sigma-12", "pixart-sigma", 12, 32),
    _for_lora("sana", 12, 64),
    _for_lora("wan-1.3b", 12, 64),
    _for_lora("wan-14b", 48, 128),
    _for_lora("wan-14b-i2v", 48, 128),
    _for_lora("ltx-video", 12, 64),
    _for_lora("hunyuan-video", 80, 128),
    _for_lora("hunyuan-video-i2v", 80, 128),
    _for_card("sdxl-controlnet-24", "sdxl-controlnet", 24, 64),
    _for_card("sd3-controlnet-24", "sd3-controlnet", 24, 64),
    _for_card("flux-controlnet-48", "flux-controlnet", 48, 384),
    _for_card("qwen-image-controlnet-80", "qwen-image-controlnet", 80, 512),
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
