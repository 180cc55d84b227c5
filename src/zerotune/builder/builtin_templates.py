"""The templates that come with the builder; each is made by ``advise`` when it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from zerotune.builder.forms import FormState
from zerotune.builder.session import default_plan
from zerotune.errors import InvalidValueError
from zerotune.plan import DeepSpeedPlan


@attrs.frozen(kw_only=True)
class BuiltinTemplate:
    """A machine and a model, for which the simplest plan that fits is looked up."""

    id: str
    name: str
    description: str
    setup: Mapping[str, Any]
    """What it sets of the setup; empty: the page's own."""


_SDXL: Final = {"family": "sdxl", "this_machine": False, "world_size": 1, "nvme": "0"}

BUILTIN: Final = (
    BuiltinTemplate(
        id="lowest",
        name="The lowest stage that works",
        description="For the model and machine chosen here: least offload, lowest stage.",
        setup={},
    ),
    BuiltinTemplate(
        id="sdxl-24",
        name="SDXL on 24 GB",
        description="One 24 GB card and 64 GB of RAM.",
        setup={**_SDXL, "vram": "24 GiB", "ram": "64 GiB"},
    ),
    BuiltinTemplate(
        id="sdxl-12",
        name="SDXL on 12 GB",
        description="One 12 GB card and 64 GB of RAM.",
        setup={**_SDXL, "vram": "12 GiB", "ram": "64 GiB"},
    ),
    BuiltinTemplate(
        id="sdxl-8",
        name="SDXL on 8 GB",
        description="One 8 GB card and 64 GB of RAM.",
        setup={**_SDXL, "vram": "8 GiB", "ram": "64 GiB"},
    ),
    BuiltinTemplate(
        id="nvme",
        name="SDXL from an NVMe drive",
        description="8 GB card, 32 GB of RAM, 200 GB of NVMe for swap files.",
        setup={**_SDXL, "vram": "8 GiB", "ram": "32 GiB", "nvme": "200 GB"},
    ),
    BuiltinTemplate(
        id="two-gpus",
        name="SDXL on two GPUs",
        description="Two 24 GB cards and 128 GB of RAM.",
        setup={**_SDXL, "vram": "24 GiB", "ram": "128 GiB", "world_size": 2},
    ),
)


def builtin_template(template_id: str) -> BuiltinTemplate:
    """A built-in template by id.

    Raises:
        InvalidValueError: There is none.
    """
    for template in BUILTIN:
        if template.id == template_id:
            return template
    raise InvalidValueError(
        "there is no such template",
        key="template",
        value=template_id,
        fix=f"use one of {', '.join(template.id for template in BUILTIN)}",
    )


def starting_plan() -> DeepSpeedPlan:
    """What a built-in template fills with what it was advised."""
    return default_plan()


def starting_state(template: BuiltinTemplate, setup: Mapping[str, Any]) -> FormState:
    """The form a template starts from, before anything is advised."""
    return FormState.of_plan(starting_plan(), setup={**setup, **template.setup})
