"""What the page offers: the fields of its form, and what can be typed into them.

Each field is described once, and the page is rendered from that. What a choice writes into the
configuration is said here, so that the page holds no rules of its own: a script that reads
``sets`` needs to know nothing of DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any, Final, Literal

import attrs

from zerotune._util.text import squash
from zerotune.builder.forms import to_wire
from zerotune.errors import UNSET, ZeroTuneError
from zerotune.optim import OPTIMIZERS, SCHEDULERS, Parameter
from zerotune.optimizers.catalogue import BY_WORD
from zerotune.plan.families import family_names, model_family
from zerotune.plan.model import (
    REMOVED,
    REMOVED_ZERO,
    ZERO_ALIASES,
    Boolean,
    ZeroSection,
    join,
    modelled,
)
from zerotune.plan.schema import Parameter as SchemaParameter
from zerotune.plan.schema import attribute_docs, known_paths, schema_parameters

ZERO: Final = "zero_optimization"

# -- The fields of the form.


Kind = Literal["value", "flag", "choice", "select", "path"]

STAGES: Final[Mapping[int, tuple[str, str]]] = {
    0: ("Off", "Every GPU holds everything: weights, gradients and optimizer states."),
    1: (
        "Optimizer states",
        (
            "Each GPU keeps its part of the optimizer states and fp32 master weights; weights and "
            "gradients are whole on every GPU."
        ),
    ),
    2: (
        "+ gradients",
        (
            "Gradients are partitioned as well; only the 16-bit weights are whole on every GPU. "
            "The stage for offloading the optimizer of a model whose weights fit."
        ),
    ),
    3: (
        "+ weights",
        (
            "Weights are partitioned too and gathered layer by layer. Needed when the 16-bit "
            "weights do not fit, for parameters in host memory, and for NVMe."
        ),
    ),
}
"""What each ZeRO stage is called, and what it partitions."""


@attrs.frozen(kw_only=True)
class Option:
    """One choice of a field."""

    label: str
    sets: Mapping[str, Any]
    """Path to the value that choosing it writes; ``None`` removes the setting."""
    hint: str = ""


@attrs.frozen(kw_only=True)
class Field:
    """One control of the page."""

    path: str
    """Where its value lies, and so which messages belong to it."""
    label: str
    kind: Kind = "value"
    hint: str = ""
    options: tuple[Option, ...] = ()
    store: Literal["config", "setup"] = "config"

    @property
    def id(self) -> str:
        """Name of the control in the page."""
        return f"{self.store}-{self.path}".replace(".", "-").replace("_", "-")


def _segments(path: str, label: str, *choices: tuple[str, Any, str]) -> Field:
    """A choice of one setting among labels, each with its value and a hint."""
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
    docs = attribute_docs(ZeroSection)
    kinds = {each.name: each.metadata["kind"] for each in modelled(ZeroSection)}
    return tuple(
        Field(
            path=join(ZERO, name),
            label=name.removeprefix("stage3_").replace("_", " ").capitalize(),
            kind="flag" if isinstance(kinds[name], Boolean) else "value",
            hint=docs[name],
        )
        for name in names
    )


def _setup_field(
    path: str, label: str, hint: str = "", *, options: Mapping[str, Any] | None = None
) -> Field:
    """A field of what is planned for; ``options``: label to value."""
    choices = tuple(
        Option(label=name, sets={path: value}) for name, value in (options or {}).items()
    )
    kind: Kind = "select" if choices else "value"
    return Field(path=path, label=label, kind=kind, hint=hint, store="setup", options=choices)


@cache
def page_fields() -> Mapping[str, Any]:
    """What the page is rendered from: its fields by the part they stand in, and their words."""
    stages = ((str(number), number, name) for number, (name, _) in STAGES.items())
    return {
        "stages": STAGES,
        "stage": _segments(
            f"{ZERO}.stage", "ZeRO stage", *stages, ("auto", "auto", "Decided at start")
        ),
        "precision": _precision_field(),
        "batch": tuple(
            Field(path=path, label=label, hint=hint) for path, label, hint in _BATCH_FIELDS
        ),
        "world": _setup_field("world_size", "Processes", "GPUs that train together."),
        "offload": (
            _offload_fields("offload_optimizer", "Optimizer", "optimizer's", "stage 1 to 3"),
            _offload_fields("offload_param", "Parameters", "parameters'", "stage 3"),
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
        "setup": _workload_fields(),
        "clip_families": [name for name in family_names() if model_family(name).frames is not None],
        "machine": _machine_fields(),
    }


_BATCH_FIELDS: Final = (
    ("train_micro_batch_size_per_gpu", "Micro batch", "Samples per forward pass and GPU."),
    ("gradient_accumulation_steps", "Accumulation", "Forward passes per optimizer step."),
    (
        "train_batch_size",
        "Whole batch",
        "Micro batch times accumulation times processes; left empty it follows from them.",
    ),
    (
        "gradient_clipping",
        "Gradient clipping",
        "Largest global norm of the gradient; 0 switches it off.",
    ),
)


def _workload_fields() -> tuple[Field, ...]:
    families = {name: name for name in family_names()}
    places = {"no": "none", "in RAM": "host", "on the GPU": "device", "on NVMe": "nvme"}
    return (
        _setup_field("family", "Model", options={**families, "another model (no estimate)": ""}),
        _setup_field("resolution", "Resolution", "Pixels of a side."),
        _setup_field("frames", "Frames", "Of a clip."),
        _setup_field("lora", "LoRA rank", "Leave empty to train the whole model."),
        _setup_field("ema", "EMA of the weights", options=places),
        _setup_field(
            "gradient_checkpointing",
            "Gradient checkpointing",
            options={"yes, recompute": True, "no, keep all": False},
        ),
        _setup_field("total_steps", "Steps of the run", "For schedules that leave it open."),
    )


def _machine_fields() -> tuple[Field, ...]:
    choices = (("a machine I describe", False, ""), ("this machine", True, ""))
    return (
        attrs.evolve(_segments("this_machine", "Plan for", *choices), store="setup"),
        _setup_field("vram", "VRAM per GPU, GiB"),
        _setup_field("ram", "RAM, GiB"),
        _setup_field("nvme", "NVMe, GiB", "0: no swap files."),
    )


# -- Optimizers, schedules and DeepSpeed's parameters, as the page lists them.


@cache
def catalogue() -> dict[str, Any]:
    """Every optimizer and schedule with its parameters."""
    return {
        "optimizers": [
            {
                "name": entry.name,
                "spellings": [word for word, name in BY_WORD.items() if name == entry.name],
                "family": entry.family,
                "summary": entry.summary,
                "requires": list(entry.requires),
                "params": _parameters(entry.parameters),
            }
            for entry in OPTIMIZERS.values()
        ],
        "schedulers": [
            {
                "name": entry.name,
                "spellings": [squash(entry.name)],
                "family": entry.source,
                "summary": entry.summary,
                "requires": [],
                "params": _parameters(entry.parameters),
            }
            for entry in SCHEDULERS.values()
        ],
    }


def _parameters(parameters: Iterable[Parameter]) -> list[dict[str, Any]]:
    return [
        {
            "name": each.name,
            "type": each.type,
            "range": each.range,
            "default": None if each.default is UNSET else to_wire(each.default),
            "required": each.default is UNSET and not each.optional,
            "optional": each.optional,
            "choices": list(each.choices),
        }
        for each in parameters
    ]


@cache
def schema_data() -> dict[str, Any]:
    """Every parameter of the installed DeepSpeed, or why there are none.

    Importing DeepSpeed takes seconds, so a page that does not open the advanced section never
    pays for it.
    """
    from zerotune.backend.schema import plan_schema

    try:
        schema = plan_schema()
    except ZeroTuneError as error:
        removed = _removed(frozenset())
        return {"available": False, "reason": str(error), "parameters": [], "removed": removed}
    known = known_paths(schema)
    parameters = [_schema_parameter(each) for each in schema_parameters(schema)]
    return {
        "available": True,
        "version": schema["x-zerotune"]["deepspeed"],
        "parameters": [each for each in parameters if each is not None],
        "removed": _removed(known),
    }


def _removed(known: Collection[str]) -> list[dict[str, str]]:
    """What older releases of DeepSpeed read, for who searches for it; not what this one knows."""
    gone = {
        **{key: f"DeepSpeed 0.19 removed {what}" for key, what in REMOVED.items()},
        **{join(ZERO, key): f"DeepSpeed 0.19 removed {what}" for key, what in REMOVED_ZERO.items()},
        **{
            join(ZERO, old): f"another spelling of {join(ZERO, new)}"
            for old, new in ZERO_ALIASES.items()
        },
    }
    return [{"path": path, "reason": gone[path]} for path in sorted(gone) if path not in known]


def _schema_parameter(each: SchemaParameter) -> dict[str, Any] | None:
    # A section is not a value to type in, and optimizers and schedules have a part of their own.
    if each.types == ("object",) or each.path.startswith(("optimizer.", "scheduler.")):
        return None
    return {
        "path": each.path,
        "types": list(each.types),
        "default": to_wire(each.default),
        "doc": each.doc,
        "deprecated": each.deprecated,
        "replaced_by": each.replaced_by,
        "stages": list(each.stages),
    }
