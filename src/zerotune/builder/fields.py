"""Fields of the page's form, and the values that they accept.

Each field is declared once, and the page is rendered from these declarations. ``Option.sets`` lists
the values that a choice writes into the configuration, so the page's scripts need no knowledge of
DeepSpeed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, Final, Literal

import attrs

from zerotune.builder.models import MODEL_NAMES, model_name
from zerotune.plan.facts import STORAGES
from zerotune.plan.families import family_names
from zerotune.plan.memory.rates import CARDS
from zerotune.plan.schema import whole_schema
from zerotune.plan.section import join, modelled
from zerotune.plan.sections import ZeroSection
from zerotune.plan.values import Boolean

ZERO: Final = "zero_optimization"

# -- The fields of the form.


Kind = Literal["value", "flag", "choice", "select", "path"]

STAGES: Final[Mapping[int, tuple[str, str]]] = {
    0: ("Off", "Every GPU has all weights, gradients and optimizer states."),
    1: (
        "Optimizer states",
        (
            "Optimizer states and fp32 master weights are partitioned; every GPU has all weights "
            "and gradients."
        ),
    ),
    2: (
        "+ gradients",
        (
            "Gradients are partitioned as well; every GPU has all 16-bit weights. Use stage 2 to "
            "offload the optimizer if the weights fit on the GPU."
        ),
    ),
    3: (
        "+ weights",
        (
            "Weights are partitioned as well and gathered layer by layer. Use stage 3 to offload "
            "parameters, to use NVMe, or if the GPU cannot hold all 16-bit weights."
        ),
    ),
}
"""Name and description of each ZeRO stage."""


@attrs.frozen(kw_only=True)
class Option:
    """One choice of a field."""

    label: str
    sets: Mapping[str, Any]
    """Values that the option writes, keyed by the setting's path; ``None`` removes the setting."""
    hint: str = ""


@attrs.frozen(kw_only=True)
class Field:
    """A control of the page."""

    path: str
    """Path of the setting; messages about this path appear next to the control."""
    label: str
    kind: Kind = "value"
    hint: str = ""
    options: tuple[Option, ...] = ()
    store: Literal["config", "setup"] = "config"

    @property
    def key(self) -> str:
        """Key of the messages about the setting."""
        return f"setup.{self.path}" if self.store == "setup" else self.path

    @property
    def id(self) -> str:
        """HTML id of the control."""
        return f"{self.store}-{self.path}".replace(".", "-").replace("_", "-")


def _segments(path: str, label: str, *choices: tuple[str, Any, str]) -> Field:
    """Return a choice field; each choice is a label, a value and a hint."""
    options = tuple(
        Option(label=name, sets={path: value}, hint=hint) for name, value, hint in choices
    )
    return Field(path=path, label=label, kind="choice", options=options)


def _precision_field() -> Field:
    choices = (("bf16", True, False), ("fp16", False, True), ("fp32", False, False))
    return Field(
        path="bf16.enabled",
        label="Precision",
        kind="choice",
        options=tuple(
            Option(label=label, sets={"bf16.enabled": bf16, "fp16.enabled": fp16})
            for label, bf16, fp16 in (*choices, ("auto", "auto", None))
        ),
    )


def _offload_fields(section: str, what: str, whose: str, stages: str) -> tuple[Field, Field]:
    device = _segments(
        f"{ZERO}.{section}.device",
        f"{what} on",
        ("GPU", "none", "not offloaded"),
        ("RAM", "cpu", stages),
        ("NVMe", "nvme", "stage 3"),
    )
    folder = Field(
        path=f"{ZERO}.{section}.nvme_path",
        label=f"Folder for the {whose} swap files",
        kind="path",
        hint="Leave empty to give each run its own temporary folder.",
    )
    return device, folder


def _zero_fields(*names: str) -> tuple[Field, ...]:
    known = json.loads(whole_schema())["properties"][ZERO]["properties"]
    kinds = {each.name: each.metadata["kind"] for each in modelled(ZeroSection)}
    return tuple(
        Field(
            path=join(ZERO, name),
            label=_label_of(name),
            kind="flag" if isinstance(kinds[name], Boolean) else "value",
            hint=_plain(known[name]["description"]),
        )
        for name in names
    )


def _label_of(name: str) -> str:
    words = name.removeprefix("stage3_").removeprefix("zero_").replace("_", " ")
    return words.replace("hpz", "secondary").capitalize()


def _plain(doc: str) -> str:
    """Strip the markup from a docstring."""
    plain = doc.replace("``", "").removeprefix("ZeRO++: ")
    return f"{plain[:1].upper()}{plain[1:]}"


def _setup_field(
    path: str, label: str, hint: str = "", *, options: Mapping[str, Any] | None = None
) -> Field:
    """Return a field of the setup; ``options`` maps labels to values."""
    choices = tuple(
        Option(label=name, sets={path: value}) for name, value in (options or {}).items()
    )
    kind: Kind = "select" if choices else "value"
    return Field(path=path, label=label, kind=kind, hint=hint, store="setup", options=choices)


@cache
def page_fields() -> Mapping[str, tuple[Field, ...]]:
    """Return the page's fields, grouped by section, with their labels and hints."""
    stages = ((str(number), number, name) for number, (name, _) in STAGES.items())
    return {
        "stage": (
            _segments(f"{ZERO}.stage", "ZeRO stage", *stages, ("auto", "auto", "Decided at start")),
        ),
        "precision": (_precision_field(),),
        "batch": tuple(
            Field(path=path, label=label, hint=hint) for path, label, hint in _BATCH_FIELDS
        ),
        "offload": (
            *_offload_fields("offload_optimizer", "Optimizer", "optimizer's", "stage 1 to 3"),
            *_offload_fields("offload_param", "Parameters", "parameters'", "stage 3"),
        ),
        "stage_3": _zero_fields(
            "stage3_prefetch_bucket_size",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_param_persistence_threshold",
            "sub_group_size",
            "stage3_gather_16bit_weights_on_model_save",
        ),
        "communication": _zero_fields(
            "overlap_comm",
            "contiguous_gradients",
            "reduce_scatter",
            "reduce_bucket_size",
            "allgather_partitions",
            "allgather_bucket_size",
            "round_robin_gradients",
        ),
        "plus_plus": _zero_fields(
            "zero_hpz_partition_size",
            "zero_quantized_weights",
            "zero_quantized_nontrainable_weights",
            "zero_quantized_gradients",
        ),
        "setup": _workload_fields(),
        "machine": _machine_fields(),
    }


def setup_labels() -> Mapping[str, str]:
    """Return the label of each field of *Model and machine*, without its unit."""
    fields = (*page_fields()["setup"], *page_fields()["machine"])
    return {field.path: field.label.partition(",")[0] for field in fields}


_BATCH_FIELDS: Final = (
    ("train_micro_batch_size_per_gpu", "Micro batch", "Samples per GPU and forward pass."),
    ("gradient_accumulation_steps", "Accumulation", "Forward passes per optimizer step."),
    (
        "train_batch_size",
        "Whole batch",
        "Micro batch times accumulation times processes; computed if left empty.",
    ),
    (
        "gradient_clipping",
        "Gradient clipping",
        "Maximum global norm of the gradient; 0 disables clipping.",
    ),
)


def _workload_fields() -> tuple[Field, ...]:
    listed = [name for name in MODEL_NAMES if name in family_names()]
    families = {model_name(name): name for name in dict.fromkeys((*listed, *family_names()))}
    storages = {"the plan's precision": "", **{name: name for name in STORAGES}}
    places = {"no": "none", "in RAM": "host", "on the GPU": "device", "on NVMe": "nvme"}
    return (
        _setup_field("family", "Model", options={**families, "another model (no estimate)": ""}),
        _setup_field("resolution", "Resolution", "Image side in pixels."),
        _setup_field("frames", "Frames", "Frames per clip."),
        _setup_field("lora", "LoRA rank", "Leave empty to train the whole model."),
        _setup_field(
            "base_dtype",
            "Base dtype",
            "Precision of the frozen base model under LoRA adapters.",
            options=storages,
        ),
        _setup_field("ema", "EMA of the weights", options=places),
        _setup_field(
            "gradient_checkpointing",
            "Gradient checkpointing",
            "Recompute activations in the backward pass, to save memory.",
            options={"yes": True, "no": False},
        ),
        _setup_field(
            "total_steps", "Steps of the run", "Length of a schedule that does not set its own."
        ),
        _setup_field("world_size", "Processes", "GPUs that train together."),
    )


def _machine_fields() -> tuple[Field, ...]:
    choices = (("a machine I describe", False, ""), ("this machine", True, ""))
    return (
        attrs.evolve(_segments("this_machine", "Plan for", *choices), store="setup"),
        _card_field(),
        _setup_field("vram", "VRAM per GPU, GiB"),
        _setup_field("ram", "RAM, GiB"),
        _setup_field("nvme", "NVMe, GiB", "0 disables swap files."),
    )


def _card_field() -> Field:
    """Return the field for the card, which sets memory and rates."""
    options = [Option(label="another card", sets={"card": ""})]
    for card in CARDS:
        sets = {"card": card.label, "vram": str(card.memory)}
        options.append(Option(label=card.label, sets=sets))
    return Field(
        path="card",
        label="Card",
        kind="select",
        hint="Sets VRAM. Predicted times use this card's rates.",
        options=tuple(options),
        store="setup",
    )
