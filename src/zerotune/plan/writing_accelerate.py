"""A plan as the YAML of ``accelerate config``.

accelerate's own keys say a plan only when it is small; a larger one is written as JSON under
``deepspeed_config_file``, which accelerate takes in place of a path. One file then says it all,
from whatever folder it is launched.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import attrs

from zerotune.decisions import Decision
from zerotune.plan.accelerate_block import FILE, GATHER, LAUNCH_IN_BLOCK, TOP_LEVEL
from zerotune.plan.kinds import AUTO, is_integer, is_number
from zerotune.plan.section import evolved
from zerotune.plan.sections import Bf16Section, Fp16Section
from zerotune.plan.writing import PlanDocument

if TYPE_CHECKING:
    from zerotune.plan.deepspeed_plan import DeepSpeedPlan

_WRITTEN_AFRESH: Final = ("distributed_type", FILE)
_UNSAFE: Final = " ;<>"
"""What may not be in a variable that accelerate passes to other machines
(``convert_dict_to_env_variables``); it drops the variable otherwise."""


def accelerate_document(plan: DeepSpeedPlan) -> PlanDocument:
    """The YAML that ``accelerate launch --config_file`` takes.

    accelerate's own keys are used where they can say the whole plan: a stage, offload to the
    CPU, accumulation, clipping above 0, saving 16-bit weights. The paths of NVMe folders are
    not among them, because ``accelerate launch`` loses those.
    """
    decisions: list[Decision] = []
    plan = _batch_settings_inside(plan, decisions)
    plan = _automatic_precision_inside(plan, decisions)
    block = _as_block(plan)
    if block is None:
        plan = _precision_inside(plan, decisions)
        block = {FILE: _config_text(plan)}
    launched = plan.launch.to_dict() if plan.launch else {}
    content: dict[str, Any] = {"distributed_type": "DEEPSPEED"}
    for key, value in launched.items():
        if key in _WRITTEN_AFRESH:
            continue
        if key in LAUNCH_IN_BLOCK:
            block[key] = value
        elif key in TOP_LEVEL:
            content[key] = "no" if (key, value) == ("mixed_precision", "fp32") else value
        else:
            reason = "accelerate refuses settings it does not know"
            decisions.append(_moved(key, value, None, reason, "warning"))
    content["deepspeed_config"] = block
    return PlanDocument(format="accelerate", text=_yaml(content), decisions=decisions)


def _as_block(plan: DeepSpeedPlan) -> dict[str, Any] | None:
    """The plan in accelerate's own keys, or ``None`` when they cannot say all of it."""
    config = plan.to_deepspeed()
    zero = config.pop("zero_optimization", {})
    accumulation = config.pop("gradient_accumulation_steps", None)
    clipping = config.pop("gradient_clipping", None)
    stage, gather = zero.pop("stage", None), zero.pop(GATHER, None)
    devices = {part: zero.pop(f"offload_{part}", None) for part in ("optimizer", "param")}
    # Clipping of 0 would be lost: accelerate drops it, and DeepSpeed clips by default.
    sayable = (
        not config
        and not zero
        and is_integer(stage)
        and (accumulation is None or is_integer(accumulation))
        and (clipping is None or (is_number(clipping) and clipping > 0))
        and isinstance(gather, bool | None)
        and all(
            section in (None, {"device": "none"}, {"device": "cpu"}) for section in devices.values()
        )
    )
    if not sayable:
        return None
    block = {
        "zero_stage": stage,
        **{
            f"offload_{part}_device": section["device"]
            for part, section in devices.items()
            if section is not None
        },
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clipping,
        "zero3_save_16bit_model": gather,
    }
    return {key: value for key, value in block.items() if value is not None}


def _config_text(plan: DeepSpeedPlan) -> str:
    # Without this section accelerate raises; an empty one means the same to DeepSpeed as none.
    config = {"zero_optimization": {}, **plan.to_deepspeed()}
    machines = plan.launch.num_machines if plan.launch else None
    if machines is None or machines == 1:
        return _Readable(json.dumps(config, indent=2, allow_nan=False) + "\n")
    text = json.dumps(config, separators=(",", ":"), allow_nan=False)
    for char in _UNSAFE:
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _batch_settings_inside(plan: DeepSpeedPlan, decisions: list[Decision]) -> DeepSpeedPlan:
    """Move what a trainer's file says beside its configuration into the configuration."""
    for key in ("gradient_accumulation_steps", "gradient_clipping"):
        launched = getattr(plan.launch, key) if plan.launch else None
        if plan.launch is None or launched is None:
            continue
        written = getattr(plan, key)
        plan = evolved(plan, launch=evolved(plan.launch, **{key: None}))
        if written in (None, AUTO):
            plan = evolved(plan, **{key: launched})
            reason = f"accelerate has one place for it; written as {key}"
            decisions.append(_moved(key, launched, launched, reason))
        else:
            reason = f"accelerate has one place for it, and {key} = {written} stands before it"
            decisions.append(_moved(key, launched, None, reason))
    return plan


def _automatic_precision_inside(plan: DeepSpeedPlan, decisions: list[Decision]) -> DeepSpeedPlan:
    launch = plan.launch
    if launch is None or launch.mixed_precision != AUTO:
        return plan
    plan = evolved(plan, launch=attrs.evolve(launch, mixed_precision=None))
    reason = "accelerate does not know it"
    if plan.bf16 is None and plan.fp16 is None:
        plan = evolved(plan, bf16=Bf16Section(enabled=AUTO))
        reason += '; bf16.enabled = "auto" leaves it open for zerotune, and is fp32 in accelerate'
    decisions.append(_moved("mixed_precision", AUTO, None, reason, "warning"))
    return plan


def _precision_inside(plan: DeepSpeedPlan, decisions: list[Decision]) -> DeepSpeedPlan:
    """Settle the precision in the configuration, beside which accelerate refuses it."""
    launch = plan.launch
    asked = launch.mixed_precision if launch else None
    if launch is None or asked is None:
        return plan
    written = {
        "bf16": plan.bf16.enabled if plan.bf16 else None,
        "fp16": plan.fp16.enabled if plan.fp16 else None,
    }
    plan = evolved(plan, launch=attrs.evolve(launch, mixed_precision=None))
    refused = f"accelerate refuses it beside a {FILE}"
    stands = True in written.values() or written.get(asked) is False or asked == "fp8"
    if stands:
        reason = f"{refused}, and the configuration's own precision stands before it"
        decisions.append(_moved("mixed_precision", asked, None, reason, "warning"))
        return plan
    for name, cls in (("bf16", Bf16Section), ("fp16", Fp16Section)):
        if name == asked or written[name] == AUTO:
            section = getattr(plan, name) or cls()
            plan = evolved(plan, **{name: evolved(section, enabled=name == asked)})
    reason = f"{refused}; the configuration's own bf16 and fp16 say the same"
    decisions.append(_moved("mixed_precision", asked, None, reason))
    return plan


def _moved(key: str, before: Any, after: Any, reason: str, severity: str = "note") -> Decision:
    return Decision(
        key=f"launch.{key}",
        before=before,
        after=after,
        reason=reason,
        severity="warning" if severity == "warning" else "note",
    )


class _Readable(str):
    """Text of several lines, written as it is."""

    __slots__ = ()


def _yaml(content: dict[str, Any]) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, _data: Any) -> bool:
            return True

    Dumper.add_representer(
        _Readable,
        lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|"),
    )
    return str(yaml.dump(content, Dumper=Dumper, sort_keys=False, width=100))
