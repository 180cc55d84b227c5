"""``plan_schema``: every parameter of the installed DeepSpeed, as JSON Schema.

``python -m tools.plan_schema`` writes it to the file that ``zerotune schema`` prints. DeepSpeed
declares its keys in three ways. Pydantic models contain types and defaults. The keys of other
sections appear only in calls such as ``get_scalar_param(section, NAME, NAME_DEFAULT)`` or
``section.get(NAME, NAME_DEFAULT)``, which ``tools.deepspeed_keys`` finds in the source. Keys that
DeepSpeed declares in any other way are defined in this module.
"""

from __future__ import annotations

import enum
import importlib
import json
import math
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from sphinx.pycode import ModuleAnalyzer

from tools.deepspeed_keys import is_json, keys_read_by, module_or_none, plain
from zerotune.backend.upstream import require_deepspeed
from zerotune.plan import DeepSpeedPlan
from zerotune.plan import schema as stored
from zerotune.plan import values as kinds
from zerotune.plan.resolve.fill import stages_of
from zerotune.plan.schema import HANDLING
from zerotune.plan.section import Nested, Section, modelled
from zerotune.platform import detect_platform

Schema = dict[str, Any]

FILE: Final = Path(stored.__file__).parent / "data" / "schema.json"
"""What ``zerotune schema`` prints."""

AUTO: Final = {"const": kinds.AUTO}

_JSON_TYPES: Final[Mapping[Any, Schema]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    Path: {"type": "string"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    type(None): {"type": "null"},
}
_BOUNDS: Final = {
    "gt": "exclusiveMinimum",
    "ge": "minimum",
    "lt": "exclusiveMaximum",
    "le": "maximum",
}

_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_SCHEMA_PRECISIONS: Final = ("fp32", "fp16", "bf16")

_SECTION_MODELS: Final[Mapping[str, tuple[str, str]]] = {
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
"""Module and pydantic model that read each section."""

_CONFIG: Final = "deepspeed.runtime.config"
_CHECKPOINT: Final = "deepspeed.runtime.model_checkpointing.config"
_SECTION_READS: Final[Mapping[str, tuple[str, str]]] = {
    "aio": ("deepspeed.runtime.swap_tensor.aio_config", "aio_dict"),
    "flops_profiler": ("deepspeed.profiling.config", "flops_profiler_dict"),
    "autotuning": ("deepspeed.autotuning.config", "autotuning_dict"),
    "expert_parallel": ("deepspeed.module_inject.auto_ep_config", "param_dict"),
    "data_types": (_CONFIG, "data_types_params"),
    "checkpoint": (_CONFIG, "checkpoint_params"),
    "activation_checkpointing": (
        "deepspeed.runtime.activation_checkpointing.config",
        "act_chkpt_config_dict",
    ),
}
"""Module and variable from which each section's keys are read one by one."""

_READ_WHOLE: Final = frozenset({"flops_profiler", "activation_checkpointing"})
"""Sections with a complete list of keys; DeepSpeed silently ignores any other key."""


def plan_schema() -> dict[str, Any]:
    """Return every parameter of the installed DeepSpeed as JSON Schema (draft 2020-12).

    The schema is derived from DeepSpeed's pydantic models, constants and code, without building ops
    or using a device. Each key has its type, ``default``, ``description`` and ``deprecated``, as
    far as they are known. Under ``x-zerotune``, a key may have ``modelled``, ``stages``,
    ``replaced_by`` and ``alias_of``. ``modelled`` says whether zerotune reads and fills the key;
    all other keys are passed through. ``stages`` lists the ZeRO stages at which the key has an
    effect, if they are known. The types are those of DeepSpeed, plus ``"auto"`` where zerotune or
    DeepSpeed accepts it. ``zerotune.plan`` also accepts looser spellings.

    Raises:
        MissingDependencyError: DeepSpeed is not installed or cannot be imported.
        UnsupportedEngineError: The installed DeepSpeed is too old.
    """
    if "deepspeed" in sys.modules:
        # The first import has selected the accelerator of the process.
        accelerator = sys.modules["deepspeed"].accelerator.get_accelerator()._name
    else:
        accelerator = detect_platform(log=False).deepspeed.accelerator or "cpu"
    deepspeed = require_deepspeed(accelerator=accelerator)
    config = importlib.import_module(_CONFIG)
    properties = _object_of(keys_read_by(_CONFIG, "param_dict", "self._param_dict"))["properties"]
    for name, (module, model) in _SECTION_MODELS.items():
        cls = getattr(module_or_none(module), model, None)
        if cls is not None:
            properties[name] = of_model(cls)
    for name, (module, variable) in _SECTION_READS.items():
        if keys := keys_read_by(module, variable):
            properties[name] = _object_of(keys)
            if name in _READ_WHOLE:
                properties[name]["additionalProperties"] = False
    properties.update(_special_sections(config))
    _add_what_zerotune_knows(properties, DeepSpeedPlan, "")
    return {
        "$schema": _DIALECT,
        "title": "DeepSpeed configuration",
        "description": f"Parameters of DeepSpeed {deepspeed.__version__}.",
        "type": "object",
        "properties": dict(sorted(properties.items())),
        "patternProperties": {"^_": {}},
        # DeepSpeed silently ignores an unknown key; zerotune rejects it.
        "additionalProperties": False,
        HANDLING: {"deepspeed": deepspeed.__version__},
    }


def _special_sections(config: Any) -> dict[str, Schema]:
    lr_schedules = importlib.import_module("deepspeed.runtime.lr_schedules")
    timers = importlib.import_module("deepspeed.utils.config")
    communication = with_auto(any_of({"enum": list(_SCHEMA_PRECISIONS)}, {"type": "null"}))
    optimizer = _named_choice(config.DEEPSPEED_OPTIMIZERS)
    optimizer["properties"]["legacy_fusion"] = of_default(config.LEGACY_FUSION_DEFAULT)
    efficiency = of_default(config.get_data_efficiency_config({}))
    # Below these sections, users choose the names.
    for section in (efficiency, *(efficiency["properties"][name] for name in _DATA_SECTIONS)):
        section["additionalProperties"] = False
    autocast = {
        "enabled": of_default(config.TORCH_AUTOCAST_ENABLED_DEFAULT),
        "dtype": {"type": ["string", "null"]},
        "lower_precision_safe_modules": {"type": "array", "items": {"type": "string"}},
    }
    operations = list(config.GRADIENT_ALLREDUCE_OP_SUPPORTED)
    return {
        "optimizer": optimizer,
        "scheduler": _named_choice(lr_schedules.VALID_LR_SCHEDULES),
        "communication_data_type": {**communication, "default": None},
        "seq_parallel_communication_data_type": {
            **communication,
            "default": config.SEQ_PARALLEL_COMMUNICATION_DATA_TYPE_DEFAULT,
        },
        "log_level": {"type": ["string", "null"], "default": None},
        "vocabulary_size": {"type": ["integer", "null"], "default": None},
        # Number of ranks per sequence; DeepSpeed reads it where it computes the world size.
        "sequence_parallel_size": {"type": "integer", "minimum": 1},
        "datastates_ckpt": {"type": ["object", "boolean"], "default": False},
        "timers": _object({"throughput": of_model(timers.DeepSpeedThroughputTimerConfig)}),
        "pipeline": of_default(config.get_pipeline_config({})),
        "data_efficiency": efficiency,
        "torch_autocast": _object(autocast),
        "checkpoint": _checkpoint_section(),
        "data_types": _data_types_section(),
        "gradient_allreduce_op": {"enum": operations, "default": operations[0]},
    }


_DATA_SECTIONS: Final = ("data_sampling", "data_routing")


def _named_choice(names: Iterable[str]) -> Schema:
    # Class names of torch.optim are accepted too, in any letter case.
    return _object(
        {
            "type": {"anyOf": [{"enum": list(names)}, {"type": "string"}]},
            "params": {"type": "object"},
        }
    )


def _checkpoint_section() -> Schema:
    section = _object_of(
        {
            **keys_read_by(_CONFIG, "checkpoint_params"),
            **keys_read_by(_CHECKPOINT, "checkpoint_dict"),
        }
    )
    section["properties"] |= {
        "writer": _object_of(keys_read_by(_CHECKPOINT, "writer_dict")),
        "parallel_write": _object_of(keys_read_by(_CONFIG, "par_write_params")),
    }
    return section


def _data_types_section() -> Schema:
    entries: dict[str, Schema] = {
        key: {"enum": [*_SCHEMA_PRECISIONS, None], "default": default}
        for key, default in keys_read_by(_CONFIG, "data_types_params").items()
    }
    if "keep_in_fp32_modules" in entries:
        entries["keep_in_fp32_modules"] = {
            "anyOf": [AUTO, {"type": "array", "items": {"type": "string"}}],
            "default": AUTO["const"],
        }
    return {**_object(entries), "additionalProperties": False}


def _object(properties: Mapping[str, Schema]) -> Schema:
    return {"type": "object", "properties": dict(properties)}


def _object_of(defaults: Mapping[str, Any]) -> Schema:
    return _object({key: of_default(default) for key, default in defaults.items()})


def attribute_docs(cls: type) -> dict[str, str]:
    """Return the docstrings of the attributes of ``cls`` and its bases, by attribute name."""
    docs: dict[str, str] = {}
    for each in reversed(cls.__mro__[:-1]):
        found = ModuleAnalyzer.for_module(each.__module__).find_attr_docs().items()
        owned = {name: lines for (owner, name), lines in found if owner == each.__qualname__}
        docs |= {name: " ".join(" ".join(lines).split()) for name, lines in owned.items()}
    return docs


def _add_what_zerotune_knows(
    properties: dict[str, Schema],
    cls: type[Section],
    path: str,
    without: frozenset[str] = frozenset(),
) -> None:
    """Add descriptions of the keys in ``cls``, and types that DeepSpeed does not declare."""
    docs = attribute_docs(cls)
    for attribute in modelled(cls):
        name, kind = attribute.name, attribute.metadata["kind"]
        entry = properties.get(name)
        if entry is None or name in without:
            continue
        typed = entry.keys() & {"anyOf", "enum", "properties"}
        if not typed and not isinstance(kind, Nested):
            entry = {**of_kind(kind), **{k: v for k, v in entry.items() if k == "default"}}
            properties[name] = entry
        if name in docs or isinstance(kind, Nested):
            entry["description"] = docs.get(name) or str(kind.cls.__doc__).splitlines()[0]
        stages = stages_of(name) if path == "zero_optimization" else ()
        entry.setdefault(HANDLING, {}).update(
            {"modelled": True, **({"stages": list(stages)} if stages else {})}
        )
        if isinstance(kind, Nested):
            inside, without_too = f"{path}.{name}" if path else name, frozenset(kind.without)
            for branch in (entry, *entry.get("anyOf", ())):
                if "properties" in branch:
                    _add_what_zerotune_knows(branch["properties"], kind.cls, inside, without_too)


# -- Types and values of Python as JSON Schema.


def of_type(annotation: Any) -> Schema:
    """Return the schema of a type annotation; an empty schema (any value) if JSON has no such type.

    Args:
        annotation: The annotation.
    """
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return any_of(*map(of_type, arguments))
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (list, tuple, dict):
        items = {"items": of_type(arguments[0])} if origin is list and arguments else {}
        return {**_JSON_TYPES[origin], **items}
    if isinstance(annotation, type):
        if issubclass(annotation, enum.Enum):
            # Enums may give one value two names.
            return {"enum": list(dict.fromkeys(member.value for member in annotation))}
        if hasattr(annotation, "model_fields"):
            return of_model(annotation)
    return dict(_JSON_TYPES.get(annotation, {}))


def any_of(*schemas: Schema) -> Schema:
    """Return a schema for values that match any of several schemas; empty if one of them is empty.

    Args:
        schemas: The schemas.
    """
    if not all(schemas):
        return {}
    return {"anyOf": list(schemas)} if len(schemas) > 1 else schemas[0]


def of_model(model: Any) -> Schema:
    """Return the schema of a pydantic model; it forbids unknown keys.

    Fields also accept ``"auto"``, because DeepSpeed removes ``"auto"`` before validation.

    Args:
        model: The pydantic model.
    """
    docs = attribute_docs(model)
    properties: Schema = {}
    for name, field in model.model_fields.items():
        entry = _of_field(field, docs.get(name))
        properties[field.alias or name] = entry
        if field.alias:
            # `populate_by_name`: DeepSpeed accepts both spellings.
            properties[name] = {**entry, HANDLING: {"alias_of": field.alias}}
    return {**_object(properties), "additionalProperties": False}


def _of_field(field: Any, doc: str | None) -> Schema:
    bounds = {
        keyword: plain(getattr(limit, name))
        for limit in field.metadata
        for name, keyword in _BOUNDS.items()
        if getattr(limit, name, None) is not None
    }
    schema = with_auto({**of_type(field.annotation), **bounds})
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    if is_json(default):
        schema["default"] = plain(default)
    if doc or field.description:
        schema["description"] = doc or field.description
    extra = field.json_schema_extra
    if isinstance(extra, Mapping) and extra.get("deprecated"):
        schema["deprecated"] = True
        if extra.get("new_param"):
            schema[HANDLING] = {"replaced_by": extra["new_param"]}
    return schema


def with_auto(schema: Schema) -> Schema:
    """Return a schema that also accepts ``"auto"``; sections and empty schemas are unchanged.

    Args:
        schema: The schema.
    """
    if not schema or "properties" in schema:
        return schema
    branches = schema.get("anyOf", [schema])
    if any("properties" in branch for branch in branches):
        return schema
    return {"anyOf": [*branches, AUTO]}


def of_kind(kind: Any) -> Schema:
    """Return the schema of a setting, given its type in ``zerotune.plan.values``.

    Args:
        kind: The type, such as an ``Integer`` or a ``Choice``.
    """
    if isinstance(kind, kinds.Boolean):
        schema: Schema = {"type": "boolean"}
    elif isinstance(kind, kinds.Integer | kinds.Number):
        schema = {"type": "integer" if isinstance(kind, kinds.Integer) else "number"}
        schema["minimum"] = kind.minimum
        if math.isfinite(kind.maximum):
            schema["maximum"] = kind.maximum
    elif isinstance(kind, kinds.Choice):
        return {"enum": list(kind.choices)}
    elif isinstance(kind, kinds.Text | kinds.Folder):
        return {"type": "string"}
    else:
        return {"type": "object"}
    return with_auto(schema) if kind.auto else schema


def of_default(value: Any) -> Schema:
    """Return the schema of a key whose only known property is its default.

    Args:
        value: The default.
    """
    if value is None or value == kinds.AUTO:
        return {"default": value}
    if isinstance(value, Mapping):
        return _object_of(value) if value else {"type": "object"}
    # The default of a float key may be an integer.
    kind = "number" if type(value) is float else _JSON_TYPES.get(type(value), {}).get("type")
    schema: Schema = {"type": kind} if kind else {}
    return {**schema, "default": plain(value)} if is_json(value) else schema


def render(schema: Schema) -> str:
    """Return the file's text."""
    return json.dumps(schema, indent=1, allow_nan=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(render(plan_schema()), encoding="utf-8")
