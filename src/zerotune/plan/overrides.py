"""Overrides: single settings put above what a plan says, under the names people use for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs

from zerotune.decisions import Decision
from zerotune.errors import InvalidValueError, PlanConflictError
from zerotune.plan.kinds import AUTO, Choice
from zerotune.plan.normalising import passed_paths
from zerotune.plan.reading import fill_from_launch, plan_from_mapping, read_launch
from zerotune.plan.section import Nested, Section, join, modelled
from zerotune.plan.sections import (
    PRECISION_SYNONYMS,
    PRECISIONS,
    LaunchSection,
    ZeroSection,
)

if TYPE_CHECKING:
    from zerotune.plan.deepspeed_plan import DeepSpeedPlan

_ZERO: Final = "zero_optimization"
SHORT_NAMES: Final = {
    "zero_stage": f"{_ZERO}.stage",
    "stage": f"{_ZERO}.stage",
    "offload_optimizer": f"{_ZERO}.offload_optimizer.device",
    "offload_optimizer_device": f"{_ZERO}.offload_optimizer.device",
    "offload_optimizer_nvme_path": f"{_ZERO}.offload_optimizer.nvme_path",
    "offload_param": f"{_ZERO}.offload_param.device",
    "offload_param_device": f"{_ZERO}.offload_param.device",
    "offload_param_nvme_path": f"{_ZERO}.offload_param.nvme_path",
    "zero3_save_16bit_model": f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
    "offload_optimizer_path": "launch.offload_optimizer_path",
    "offload_param_path": "launch.offload_param_path",
    "zero3_init_flag": "launch.zero3_init_flag",
    "deepspeed_moe_layer_cls_names": "launch.deepspeed_moe_layer_cls_names",
    "num_processes": "launch.num_processes",
    "num_machines": "launch.num_machines",
    "max_grad_norm": "gradient_clipping",
    "batch_size": "train_micro_batch_size_per_gpu",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "lr": "optimizer.params.lr",
    "learning_rate": "optimizer.params.lr",
    "optimizer": "optimizer.type",
    "scheduler": "scheduler.type",
    "lr_scheduler": "scheduler.type",
    "bf16": "bf16.enabled",
    "fp16": "fp16.enabled",
}
"""Name accelerate, trainers and scripts use, to the path of the setting. Every key of
``zero_optimization`` may be written without its section too, and ``mixed_precision`` (or
``precision``) sets ``bf16.enabled`` and ``fp16.enabled`` together."""

_PRECISION_NAMES: Final = ("mixed_precision", "precision")
_NVME_PATH: Final = "nvme_path"
_PRECISION: Final = Choice(choices=(*PRECISIONS, AUTO), synonyms=PRECISION_SYNONYMS)
_REASON: Final = "overridden by the caller"
_LAUNCH: Final = "launch"
_DEEPEST: Final = 50


def override_plan(
    plan: DeepSpeedPlan, overrides: Mapping[str, Any], *, reason: str = _REASON
) -> DeepSpeedPlan:
    """Put settings above those of ``plan``; see ``DeepSpeedPlan.with_overrides``.

    Args:
        plan: What they are put above.
        overrides: Settings by path, nested or by a short name; ``None`` removes one.
        reason: Why, for the decisions.

    Raises:
        PlanError: As in ``DeepSpeedPlan.from_dict``.
    """
    config = plan.to_deepspeed()
    config[_LAUNCH] = plan.launch.to_dict() if plan.launch else {}
    decisions: list[Decision] = []
    for path, value in _settings(plan, overrides).items():
        before = _put(config, path.split("."), value, path)
        if before != value or type(before) is not type(value):
            decisions.append(Decision(key=path, before=before, after=value, reason=reason))
    read: list[Decision] = []
    known = passed_paths(plan)
    section = read_launch(config.pop(_LAUNCH, {}), read, known)
    new = plan_from_mapping(config, source=plan.source, also_known=known)
    found = (*plan.decisions, *decisions, *read, *new.decisions)
    return fill_from_launch(attrs.evolve(new, decisions=found), section)


def _settings(plan: DeepSpeedPlan, overrides: Any) -> dict[str, Any]:
    """Path to value, every short name written out; two names for one path are refused."""
    if not isinstance(overrides, Mapping):
        raise InvalidValueError(
            "must be a mapping", key="overrides", value=overrides, fix='write {"zero_stage": 2}'
        )
    settings: dict[str, Any] = {}
    for written, value in _flattened(overrides, "", 0):
        for path, each in _written_out(plan, written, value):
            if path in settings and settings[path] != each:
                raise PlanConflictError(
                    "is overridden twice, with different values",
                    key=path,
                    value=each,
                    fix="keep one of the two",
                )
            settings[path] = each
    return settings


def _flattened(overrides: Mapping[Any, Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    if depth > _DEEPEST:
        raise InvalidValueError("is nested too deeply", key="overrides", fix="nest less")
    for name, value in overrides.items():
        if not isinstance(name, str) or not all(name.split(".")):
            raise InvalidValueError(
                "is not the path of a setting",
                key=prefix or "overrides",
                value=name,
                fix='write "section.key"',
            )
        path = join(prefix, name)
        if isinstance(value, Mapping) and value:
            yield from _flattened(value, path, depth + 1)
        else:
            yield path, value


def _written_out(plan: DeepSpeedPlan, name: str, value: Any) -> list[tuple[str, Any]]:
    if name in _PRECISION_NAMES:
        return _precision(plan, name, value)
    if name == _NVME_PATH:
        return _swap_folders(plan, value)
    stage = name == _ZERO and isinstance(value, bool)  # DeepSpeed's old form: true is stage 1
    return [(_canonical(_place(name, value)), int(value) if stage else value)]


def _place(name: str, value: Any) -> str:
    """The path of a setting under the name given; a lone value means a section's main key."""
    alone = isinstance(value, str | bool)
    if name == _ZERO and isinstance(value, bool):
        return f"{_ZERO}.stage"
    if name in SHORT_NAMES and not isinstance(value, Mapping):
        # null on the short name of a section means the section and not its main key.
        whole = value is None and SHORT_NAMES[name].startswith(f"{name}.")
        return name if whole else SHORT_NAMES[name]
    if name in (f"{_ZERO}.offload_optimizer", f"{_ZERO}.offload_param") and alone:
        return f"{name}.device"
    return f"{_ZERO}.{name}" if name.partition(".")[0] in _zero_keys() else name


def _canonical(path: str) -> str:
    """A path with every part in the spelling of its section."""
    from zerotune.plan.deepspeed_plan import DeepSpeedPlan

    first, _, rest = path.partition(".")
    cls: type[Section] | None = LaunchSection if first == _LAUNCH and rest else DeepSpeedPlan
    parts = path.split(".")
    done = [parts.pop(0)] if cls is LaunchSection else []
    for part in parts:
        name = part if cls is None else cls.aliases.get(part, part)
        done.append(name)
        kinds = {each.name: each.metadata["kind"] for each in modelled(cls)} if cls else {}
        kind = kinds.get(name)
        cls = kind.cls if isinstance(kind, Nested) else None
    return ".".join(done)


def _zero_keys() -> frozenset[str]:
    names = {attribute.name for attribute in modelled(ZeroSection)}
    return frozenset({*names, *ZeroSection.aliases, *ZeroSection.passed_through})


def _precision(plan: DeepSpeedPlan, name: str, value: Any) -> list[tuple[str, Any]]:
    settings: list[tuple[str, Any]] = []
    if plan.launch is not None and plan.launch.mixed_precision is not None:
        settings.append(("launch.mixed_precision", None))
    if value is None:
        return [*settings, ("bf16.enabled", None), ("fp16.enabled", None)]
    precision, _ = _PRECISION.read(value, name)
    if precision == AUTO:
        return [*settings, ("bf16.enabled", AUTO), ("fp16.enabled", None)]
    return [
        *settings,
        ("bf16.enabled", precision == "bf16"),
        ("fp16.enabled", precision == "fp16"),
    ]


def _swap_folders(plan: DeepSpeedPlan, value: Any) -> list[tuple[str, Any]]:
    devices = {"optimizer": plan.offload_optimizer_device, "param": plan.offload_param_device}
    swapped = [part for part, device in devices.items() if device == "nvme"]
    if not swapped:
        raise PlanConflictError(
            "nothing is offloaded to NVMe",
            key=_NVME_PATH,
            value=value,
            fix='offload first, or write "offload_optimizer_device"',
        )
    return [(f"{_ZERO}.offload_{part}.nvme_path", value) for part in swapped]


def _put(node: dict[str, Any], path: list[str], value: Any, key: str) -> Any:
    """Write one setting, ``None`` for none, and return the one before."""
    *parents, last = path
    for parent in parents:
        below = node.get(parent)
        if below is None:
            if value is None:
                return None
            below = node[parent] = {}
        if not isinstance(below, dict):
            raise InvalidValueError(
                f"{parent!r} is no section", key=key, value=below, fix="override it as a whole"
            )
        node = below
    before = node.pop(last, None)
    if value is not None:
        node[last] = value
    return before
