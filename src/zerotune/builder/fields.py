"""The fields of the form: one description each, from which the page is rendered.

What a choice writes into the configuration is said here, so that the page holds no rules of its
own: a script that reads ``sets`` needs to know nothing of DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final, Literal

import attrs

from zerotune.plan.families import family_names, model_family
from zerotune.plan.model import (
    AioSection,
    Bf16Section,
    Fp16Section,
    OffloadSection,
    ZeroSection,
    join,
)
from zerotune.plan.schema import attribute_docs

Kind = Literal["value", "flag", "choice", "select", "path"]
ZERO: Final = "zero_optimization"

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
    automatic: bool = True
    """Whether ``"auto"`` can be written."""

    @property
    def id(self) -> str:
        """Name of the control in the page."""
        return f"{self.store}-{self.path}".replace(".", "-").replace("_", "-")


def _devices(section: str, what: str) -> Field:
    path = f"{ZERO}.{section}.device"
    places = (
        ("none", "GPU", "not offloaded"),
        ("cpu", "RAM", "stage 1 to 3" if section == "offload_optimizer" else "stage 3"),
        ("nvme", "NVMe", "stage 3"),
    )
    return Field(
        path=path,
        label=f"{what} on",
        kind="choice",
        options=tuple(
            Option(label=label, sets={path: device}, hint=hint) for device, label, hint in places
        ),
    )


STAGE: Final = Field(
    path=f"{ZERO}.stage",
    label="ZeRO stage",
    kind="choice",
    options=(
        *(
            Option(label=str(stage), sets={f"{ZERO}.stage": stage}, hint=name)
            for stage, (name, _) in STAGES.items()
        ),
        Option(label="auto", sets={f"{ZERO}.stage": "auto"}, hint="Decided at start"),
    ),
)
PRECISION: Final = Field(
    path="bf16.enabled",
    label="Precision",
    kind="choice",
    options=(
        Option(label="bf16", sets={"bf16.enabled": True, "fp16.enabled": False}),
        Option(label="fp16", sets={"bf16.enabled": False, "fp16.enabled": True}),
        Option(label="fp32", sets={"bf16.enabled": False, "fp16.enabled": False}),
        Option(label="auto", sets={"bf16.enabled": "auto", "fp16.enabled": None}),
    ),
)
BATCH: Final = (
    Field(
        path="train_micro_batch_size_per_gpu",
        label="Micro batch",
        hint="Samples per forward pass and GPU.",
    ),
    Field(
        path="gradient_accumulation_steps",
        label="Accumulation",
        hint="Forward passes per optimizer step.",
    ),
    Field(
        path="train_batch_size",
        label="Whole batch",
        hint="Micro batch times accumulation times processes; left empty it follows from them.",
    ),
    Field(
        path="gradient_clipping",
        label="Gradient clipping",
        hint="Largest global norm of the gradient; 0 switches it off.",
    ),
)
WORLD: Final = Field(
    path="world_size",
    label="Processes",
    hint="GPUs that train together.",
    store="setup",
    automatic=False,
)
OFFLOAD: Final = (
    (
        _devices("offload_optimizer", "Optimizer"),
        Field(
            path=f"{ZERO}.offload_optimizer.nvme_path",
            label="Folder for the optimizer's swap files",
            kind="path",
            hint="Empty: a leased folder of its own for each run.",
        ),
    ),
    (
        _devices("offload_param", "Parameters"),
        Field(
            path=f"{ZERO}.offload_param.nvme_path",
            label="Folder for the parameters' swap files",
            kind="path",
            hint="Empty: a leased folder of its own for each run.",
        ),
    ),
)
_STAGE_3: Final = (
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold",
    "sub_group_size",
    "stage3_gather_16bit_weights_on_model_save",
)
_COMMUNICATION: Final = (
    "overlap_comm",
    "contiguous_gradients",
    "reduce_scatter",
    "reduce_bucket_size",
    "allgather_partitions",
    "allgather_bucket_size",
    "round_robin_gradients",
)
_FLAGS: Final = frozenset(
    {
        "stage3_gather_16bit_weights_on_model_save",
        "overlap_comm",
        "contiguous_gradients",
        "reduce_scatter",
        "allgather_partitions",
        "round_robin_gradients",
    }
)


def _zero_field(name: str) -> Field:
    label = name.removeprefix("stage3_").replace("_", " ")
    return Field(
        path=join(ZERO, name),
        label=f"{label[:1].upper()}{label[1:]}",
        kind="flag" if name in _FLAGS else "value",
        hint=documentation()[join(ZERO, name)],
    )


def stage_3_fields() -> tuple[Field, ...]:
    """Options that only stage 3 has."""
    return tuple(map(_zero_field, _STAGE_3))


def communication_fields() -> tuple[Field, ...]:
    """How gradients and weights travel."""
    return tuple(map(_zero_field, _COMMUNICATION))


def setup_fields() -> tuple[Field, ...]:
    """Model and workload."""
    families = [Option(label=name, sets={"family": name}) for name in family_names()]
    places = (("none", "no"), ("host", "in RAM"), ("device", "on the GPU"), ("nvme", "on NVMe"))
    return (
        Field(
            path="family",
            label="Model",
            kind="select",
            store="setup",
            options=(*families, Option(label="another model (no estimate)", sets={"family": ""})),
        ),
        Field(path="resolution", label="Resolution", store="setup", hint="Pixels of a side."),
        Field(path="frames", label="Frames", store="setup", hint="Of a clip."),
        Field(
            path="lora",
            label="LoRA rank",
            store="setup",
            hint="Of adapters on the attention projections; empty trains the whole model.",
        ),
        Field(
            path="ema",
            label="EMA of the weights",
            kind="select",
            store="setup",
            options=tuple(Option(label=label, sets={"ema": place}) for place, label in places),
        ),
        Field(
            path="gradient_checkpointing",
            label="Gradient checkpointing",
            kind="select",
            store="setup",
            options=(
                Option(label="yes, recompute", sets={"gradient_checkpointing": True}),
                Option(label="no, keep all", sets={"gradient_checkpointing": False}),
            ),
        ),
        Field(
            path="total_steps",
            label="Steps of the run",
            store="setup",
            hint="For schedules that leave it open.",
        ),
    )


def clip_families() -> tuple[str, ...]:
    """Models that have a field for frames."""
    return tuple(name for name in family_names() if model_family(name).frames is not None)


def machine_fields() -> tuple[Field, ...]:
    """The machine that is planned for."""
    return (
        Field(
            path="this_machine",
            label="Machine",
            kind="choice",
            store="setup",
            options=(
                Option(label="chosen below", sets={"this_machine": False}),
                Option(label="this machine", sets={"this_machine": True}),
            ),
        ),
        Field(path="vram", label="VRAM per GPU, GiB", store="setup"),
        Field(path="ram", label="RAM, GiB", store="setup"),
        Field(path="nvme", label="NVMe, GiB", store="setup", hint="0: no swap files."),
    )


@cache
def documentation() -> Mapping[str, str]:
    """One sentence for each modelled key, by path."""
    found: dict[str, str] = {}
    for section, cls in (
        (ZERO, ZeroSection),
        (f"{ZERO}.offload_optimizer", OffloadSection),
        (f"{ZERO}.offload_param", OffloadSection),
        ("bf16", Bf16Section),
        ("fp16", Fp16Section),
        ("aio", AioSection),
    ):
        for name, text in attribute_docs(cls).items():
            found[join(section, name)] = text
    return found
