"""Schema of the values that DeepSpeed rejects in sections that plans pass through unchanged.

``python -m tools.deepspeed_schema`` writes it from the installed DeepSpeed's pydantic models,
because the plan layer does not import DeepSpeed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.plan_schema import plan_schema
from zerotune.plan import schema
from zerotune.plan.keys import OFFLOAD, ZERO
from zerotune.plan.schema import HANDLING

FILE = Path(schema.__file__).parent / "data" / "deepspeed.json"

_SECTIONS = (
    "comet", "comms_logger", "compile", "csv_monitor", "hybrid_engine", "tensor_parallel",
    "tensorboard", "timers", "wandb", "weight_quantization",
)  # fmt: skip
"""Sections that DeepSpeed validates with pydantic models."""
_MAY_BE_AUTO = {"comet", "csv_monitor", "tensorboard", "wandb"}
_READ_AS_OBJECTS = (
    "activation_checkpointing", "autotuning", "checkpoint", "data_efficiency", "data_types",
    "expert_parallel", "flops_profiler", "pipeline", "torch_autocast",
)  # fmt: skip
"""Sections that DeepSpeed reads key by key; it checks few of their values."""
_TRUTH = {"enum": [True, False, 0, 1]}
_DTYPES = (
    *("bf16", "bfloat16", "torch.bfloat16", "fp16", "float16", "half", "torch.float16"),
    *("fp32", "float32", "float", "torch.float32"),
)
_WRITER = {
    "type": {"enum": [None, "mock", "python", "fast"], HANDLING: "any case"},
    "data_parallel": {"enum": [None, "replica", "socket", "machine"], HANDLING: "any case"},
}
_NAMES = {"type": "array", "items": {"type": "string"}}
_JUDGED_IN_CODE = {
    "checkpoint": {
        "tag_validation": {"enum": ["warn", "ignore", "fail"], HANDLING: "any case"},
        "parallel_write": {"type": "object", "properties": {"pipeline_stage": _TRUTH}},
        "writer": {"anyOf": [{"type": "object", "properties": _WRITER}, {"type": "null"}]},
    },
    "data_types": {
        "keep_in_fp32_modules": {"anyOf": [{"const": "auto"}, _NAMES]},
        **{f"{one}_dtype": {"enum": [*_DTYPES, None]} for one in ("grad_accum", "param", "buffer")},
    },
    "flops_profiler": {"enabled": _TRUTH},
    "torch_autocast": {
        "dtype": {"enum": list(_DTYPES)}, "lower_precision_safe_modules": _NAMES,
    },
}  # fmt: skip
"""Values of these sections that DeepSpeed's code, not a model, checks."""
_SPOKEN_FREELY = {"description", "default", "deprecated", HANDLING}
_WORDS = {
    "anyOf": [
        {"enum": ["fp32", "fp16", "bf16", None], HANDLING: "any case"},
        {"const": "auto"},  # Resolving refuses this value with a better message.
    ]
}
_TEXT = {"anyOf": [{"type": "string"}, _NAMES]}


def deepspeed_schema() -> dict[str, Any]:
    """Return the schema of what DeepSpeed itself validates, by key."""
    whole = plan_schema()
    top, zero = whole["properties"], whole["properties"]["zero_optimization"]["properties"]
    offload = _object(zero["offload_optimizer"])["properties"]
    found = {name: _plain(top[name]) for name in _SECTIONS if name in top}
    for name in _MAY_BE_AUTO & found.keys():
        found[name] = {"anyOf": [found[name], {"const": "auto"}]}
    found["communication_data_type"] = _WORDS
    found["seq_parallel_communication_data_type"] = _WORDS
    if "gradient_allreduce_op" in top:
        words = top["gradient_allreduce_op"]["enum"]
        found["gradient_allreduce_op"] = {"enum": words, HANDLING: "any case"}
    for name in _READ_AS_OBJECTS:
        section = _objects(top[name])
        section.setdefault("properties", {}).update(_JUDGED_IN_CODE.get(name, {}))
        found[name] = section
    found["expert_parallel"] = {"anyOf": [found["expert_parallel"], {"type": "null"}]}
    # Not validated: DeepSpeed uses them as a boolean or a divisor.
    found["prescale_gradients"] = _TRUTH
    found["gradient_predivide_factor"] = {"type": "number", "exclusiveMinimum": 0}
    found["vocabulary_size"] = {"type": ["integer", "null"]}
    found["sequence_parallel_size"] = {"type": "integer", "minimum": 1}
    if "tensor_parallel" in found:
        # A torch.dtype, which JSON cannot express.
        _object(found["tensor_parallel"])["properties"]["dtype"] = {"enum": ["auto"]}
    sections = {name: _plain(zero[name]) for name in sorted(ZERO) if name in zero}
    # Checked by validators in code, which the generated schema lacks.
    if "leaf_module" in sections:
        inside = _object(sections["leaf_module"])["properties"]
        inside.update(dict.fromkeys(("classes", "names", "name_suffixes"), _TEXT))
    if "zenflow" in sections:
        inside = _object(sections["zenflow"])["properties"]
        inside["select_strategy"] = {"enum": ["auto", "step", "epoch"]}
        inside["select_interval"] = {"anyOf": [{"type": "integer"}, {"const": "auto"}]}
        inside["update_interval"] = {
            "anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}]
        }
    found["zero_optimization"] = {
        "properties": {
            **sections,
            "offload_optimizer": {
                "properties": {
                    name: _plain(offload[name]) for name in sorted(OFFLOAD & set(offload))
                }
            },
            "offload_param": {"properties": {}, "additionalProperties": False},
        }
    }
    return {"deepspeed": whole[HANDLING]["deepspeed"], "properties": found}


def _objects(schema: dict[str, Any]) -> dict[str, Any]:
    """Keep only nested sections, and all key names of sections that allow no others."""
    closed = {key: schema[key] for key in ("additionalProperties",) if key in schema}
    inside = {
        name: _objects(entry) if entry.get("type") == "object" else {}
        for name, entry in sorted(schema.get("properties", {}).items())
        if (closed or entry.get("type") == "object") and not name.endswith("_schedule")
    }
    return {"type": "object", **({"properties": inside} if inside else {}), **closed}


def _object(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the branch that describes an object."""
    if "properties" in schema:
        return schema
    return next(branch for branch in schema["anyOf"] if "properties" in branch)


def _plain(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return [_plain(each) for each in schema] if isinstance(schema, list) else schema
    kept = {key: value for key, value in schema.items() if key not in _SPOKEN_FREELY}
    if "properties" in kept:
        inside = {name: _plain(value) for name, value in sorted(kept.pop("properties").items())}
        return {**_plain(kept), "properties": inside}
    return {key: _plain(value) for key, value in kept.items()}


def render(schema: dict[str, Any]) -> str:
    """Return the file's text."""
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    FILE.write_text(render(deepspeed_schema()), encoding="utf-8")
