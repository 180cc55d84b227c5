"""Built-in templates: a model and a machine, for which ``advise`` finds the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from zerotune.builder.forms import FormState
from zerotune.builder.models import MODEL_NAMES
from zerotune.builder.session import default_plan
from zerotune.errors import InvalidValueError


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
    id_: str, family: str, vram: int, ram: int, kind: str = "", more: str = "", **setup: Any
) -> BuiltinTemplate:
    name, group = MODEL_NAMES[family]
    cards = f"Two {vram} GB cards" if "world_size" in setup else f"One {vram} GB card"
    return BuiltinTemplate(
        id=id_,
        name=f"{name} {kind or f'on {vram} GB'}",
        description=f"{cards}, {ram} GB of RAM{more}.",
        group=group,
        setup={**_ON_ONE_CARD, "family": family, "vram": str(vram), "ram": str(ram), **setup},
    )


def _for_lora(family: str, vram: int, ram: int, base: str = "") -> BuiltinTemplate:
    kind = f"LoRA of rank {_LORA_RANK} on {vram} GB"
    more = f", and the base model in {base}" if base else ""
    setup = {"lora": _LORA_RANK, "base_dtype": base}
    return _for_card(f"{family}-lora", family, vram, ram, kind, more, **setup)


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
        *("nvme", "sdxl", 8, 32, "from an NVMe drive", ", 200 GB of NVMe for swap files"),
        nvme="200 GB",
    ),
    _for_card("two-gpus", "sdxl", 24, 128, "on two GPUs", world_size=2),
    _for_lora("sdxl", 12, 32),
    _for_card("sd15-8", "sd15", 8, 32),
    _for_lora("sd35-large", 24, 64),
    _for_lora("flux", 16, 32, "nf4"),
    _for_lora("qwen-image", 24, 64, "nf4"),
    _for_lora("wan-14b", 48, 128),
)


def builtin_template(template_id: str) -> BuiltinTemplate:
    """Return a built-in template by its id."""
    if template_id in (known := {template.id: template for template in BUILTIN}):
        return known[template_id]
    raise InvalidValueError(
        "is not the name of a template",
        f"use one of {', '.join(known)}",
        "template",
        template_id,
    )


def starting_state(template: BuiltinTemplate, setup: Mapping[str, Any]) -> FormState:
    """Return the initial form of a template, before the plan is chosen."""
    return FormState.of_plan(default_plan(), setup={**setup, **template.setup})
