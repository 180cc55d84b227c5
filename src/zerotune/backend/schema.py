"""``plan_schema``: every parameter of the installed DeepSpeed, as JSON Schema."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any, Final

from zerotune.backend.require import require_deepspeed
from zerotune.backend.schema_sources import module_or_none, read_keys
from zerotune.backend.schema_types import (
    AUTO,
    Schema,
    any_of,
    of_default,
    of_kind,
    of_model,
    with_auto,
)
from zerotune.plan import DeepSpeedPlan
from zerotune.plan.filling import stages_of
from zerotune.plan.schema import HANDLING, attribute_docs
from zerotune.plan.section import Nested, Section, modelled
from zerotune.platform import detect_platform

_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_PRECISIONS: Final = ("fp32", "fp16", "bf16")

_MODELS: Final[Mapping[str, tuple[str, str]]] = {
    "zero_optimization": ("deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"),
    "bf16": ("deepspeed.runtime.precision_config", "DeepSpeedBF16Config"),
    "fp16": ("deepspeed.runtime.precision_config", "DeepSpeedFP16Config"),
    "tensorboard": ("deepspeed.monitor.config", "TensorBoardConfig"),
    "wandb": ("deepspeed.monitor.config", "WandbConfig"),
    "csv_monitor": ("deepspeed.monitor.config", "CSVConfig"),
    "comet": ("deepspeed.monitor.config", "CometConfig"),
    "comms_logger": ("deepspeed.comm.config", "CommsLoggerConfig"),
    "hybrid_engine": ("deepspeed.runtime.config", "HybridEngineConfig"),
    "compile": ("deepspeed.compile.config", "CompileConfig"),
    "weight_quantization": ("deepspeed.inference.config", "WeightQuantConfig"),
    "tensor_parallel": ("deepspeed.runtime.tensor_parallel.config", "TPTrainingConfig"),
}
"""Section to the pydantic model that reads it."""

_CALLS: Final[Mapping[str, tuple[str, str]]] = {
    "aio": ("deepspeed.runtime.swap_tensor.aio_config", "aio_dict"),
    "flops_profiler": ("deepspeed.profiling.config", "flops_profiler_dict"),
    "autotuning": ("deepspeed.autotuning.config", "autotuning_dict"),
    "expert_parallel": ("deepspeed.module_inject.auto_ep_config", "param_dict"),
    "data_types": ("deepspeed.runtime.config", "data_types_params"),
    "checkpoint": ("deepspeed.runtime.config", "checkpoint_params"),
    "activation_checkpointing": (
        "deepspeed.runtime.activation_checkpointing.config",
        "act_chkpt_config_dict",
    ),
}
"""Section to the module that reads its keys one by one, and the variable it reads from."""


def plan_schema() -> dict[str, Any]:
    """Every parameter of the installed DeepSpeed as JSON Schema (draft 2020-12).

    Made from DeepSpeed's own pydantic models, constants and code; no op is built, and nothing
    touches a device. Each key has its type, ``default``, ``description`` and ``deprecated``, and
    under ``x-zerotune``: ``modelled`` (zerotune reads and fills it; other keys pass through),
    ``stages`` (ZeRO stages where it has an effect, where known), ``replaced_by`` and
    ``alias_of``. Types are DeepSpeed's, ``"auto"`` included where zerotune or DeepSpeed takes it;
    ``zerotune.plan`` also reads looser spellings.

    ``zerotune.plan.schema`` reads the result without DeepSpeed.

    Raises:
        MissingDependencyError: DeepSpeed is not installed or does not import.
        UnsupportedEngineError: It is too old.
    """
    deepspeed = require_deepspeed(accelerator=_accelerator())
    config = importlib.import_module("deepspeed.runtime.config")
    properties = {
        name: of_default(default)
        for name, default in read_keys(config, "param_dict", "self._param_dict").items()
    }
    properties.update(_modelled_sections())
    properties.update(_read_sections())
    properties.update(_special_sections(config))
    _add_what_zerotune_knows(properties, DeepSpeedPlan, "")
    return {
        "$schema": _DIALECT,
        "title": "DeepSpeed configuration",
        "description": f"Parameters of DeepSpeed {deepspeed.__version__}.",
        "type": "object",
        "properties": dict(sorted(properties.items())),
        "patternProperties": {"^_": {}},
        # DeepSpeed ignores an unknown key in silence; zerotune refuses it.
        "additionalProperties": False,
        HANDLING: {"deepspeed": deepspeed.__version__},
    }


def _accelerator() -> str:
    """The one DeepSpeed runs on here: the first import decides for the whole process."""
    if "deepspeed" in sys.modules:
        running: str = sys.modules["deepspeed"].accelerator.get_accelerator()._name
        return running
    return detect_platform(log=False).deepspeed.accelerator or "cpu"


def _modelled_sections() -> dict[str, Schema]:
    found = {}
    for name, (module, model) in _MODELS.items():
        cls = getattr(module_or_none(module), model, None)
        if cls is not None:
            found[name] = of_model(cls)
    throughput = getattr(
        module_or_none("deepspeed.utils.config"), "DeepSpeedThroughputTimerConfig", None
    )
    if throughput is not None:
        found["timers"] = _object({"throughput": of_model(throughput)})
    return found


def _read_sections() -> dict[str, Schema]:
    found = {}
    for name, (module, variable) in _CALLS.items():
        keys = read_keys(module_or_none(module), variable)
        if keys:
            found[name] = _object({key: of_default(default) for key, default in keys.items()})
    return found


def _special_sections(config: Any) -> dict[str, Schema]:
    optimizers = list(getattr(config, "DEEPSPEED_OPTIMIZERS", ()))
    schedules = importlib.import_module("deepspeed.runtime.lr_schedules").VALID_LR_SCHEDULES
    communication = with_auto(any_of({"enum": list(_PRECISIONS)}, {"type": "null"}))
    optimizer = _named_choice(optimizers)
    optimizer["properties"]["legacy_fusion"] = of_default(config.LEGACY_FUSION_DEFAULT)
    operations = list(getattr(config, "GRADIENT_ALLREDUCE_OP_SUPPORTED", ()))
    found: dict[str, Schema] = {
        "optimizer": optimizer,
        "scheduler": _named_choice(schedules),
        "communication_data_type": {**communication, "default": None},
        "seq_parallel_communication_data_type": {
            **communication,
            "default": config.SEQ_PARALLEL_COMMUNICATION_DATA_TYPE_DEFAULT,
        },
        "log_level": {"type": ["string", "null"], "default": None},
        "vocabulary_size": {"type": ["integer", "null"], "default": None},
        # The number of ranks of one sequence; read where the world size is computed.
        "sequence_parallel_size": {"type": "integer", "minimum": 1},
        "datastates_ckpt": {"type": ["object", "boolean"], "default": False},
        "pipeline": of_default(config.get_pipeline_config({})),
        "data_efficiency": of_default(config.get_data_efficiency_config({})),
        "torch_autocast": _autocast(config),
        "checkpoint": _checkpoint(config),
        "data_types": _data_types(config),
    }
    if operations:
        found["gradient_allreduce_op"] = {"enum": operations, "default": operations[0]}
    return found


def _named_choice(names: list[str]) -> Schema:
    # Any class name of torch.optim is taken too, in any case.
    return _object(
        {
            "type": {"anyOf": [{"enum": names}, {"type": "string"}]},
            "params": {"type": "object"},
        }
    )


def _autocast(config: Any) -> Schema:
    return _object(
        {
            "enabled": of_default(config.TORCH_AUTOCAST_ENABLED_DEFAULT),
            "dtype": {"type": ["string", "null"]},
            "lower_precision_safe_modules": {"type": "array", "items": {"type": "string"}},
        }
    )


def _checkpoint(config: Any) -> Schema:
    reading = module_or_none("deepspeed.runtime.model_checkpointing.config")
    keys = {**read_keys(config, "checkpoint_params"), **read_keys(reading, "checkpoint_dict")}
    entries = {key: of_default(default) for key, default in keys.items()}
    entries["writer"] = _object(
        {key: of_default(default) for key, default in read_keys(reading, "writer_dict").items()}
    )
    entries["parallel_write"] = _object(
        {key: of_default(value) for key, value in read_keys(config, "par_write_params").items()}
    )
    return _object(entries)


def _data_types(config: Any) -> Schema:
    entries: dict[str, Schema] = {
        key: {"enum": [*_PRECISIONS, None], "default": default}
        for key, default in read_keys(config, "data_types_params").items()
    }
    if "keep_in_fp32_modules" in entries:
        entries["keep_in_fp32_modules"] = {
            "anyOf": [AUTO, {"type": "array", "items": {"type": "string"}}],
            "default": AUTO["const"],
        }
    return _object(entries)


def _object(properties: Mapping[str, Schema]) -> Schema:
    return {"type": "object", "properties": dict(properties)}


def _add_what_zerotune_knows(
    properties: dict[str, Schema],
    cls: type[Section],
    path: str,
    without: frozenset[str] = frozenset(),
) -> None:
    """Document the keys that ``cls`` models, and type those DeepSpeed leaves untyped."""
    docs = attribute_docs(cls)
    for attribute in modelled(cls):
        name, kind = attribute.name, attribute.metadata["kind"]
        entry = properties.get(name)
        if entry is None or name in without:
            continue
        if not _is_typed_by_deepspeed(entry) and not isinstance(kind, Nested):
            entry = {**of_kind(kind), **{k: v for k, v in entry.items() if k == "default"}}
            properties[name] = entry
        if name in docs or isinstance(kind, Nested):
            entry["description"] = docs.get(name) or str(kind.cls.__doc__).splitlines()[0]
        stages = stages_of(name) if path == "zero_optimization" else ()
        entry.setdefault(HANDLING, {}).update(
            {"modelled": True, **({"stages": list(stages)} if stages else {})}
        )
        if isinstance(kind, Nested):
            inside = f"{path}.{name}" if path else name
            _inside(entry, kind, inside)


def _inside(entry: Schema, kind: Nested, path: str) -> None:
    for branch in (entry, *entry.get("anyOf", ())):
        if "properties" in branch:
            _add_what_zerotune_knows(branch["properties"], kind.cls, path, frozenset(kind.without))


def _is_typed_by_deepspeed(entry: Schema) -> bool:
    return "anyOf" in entry or "enum" in entry or "properties" in entry
