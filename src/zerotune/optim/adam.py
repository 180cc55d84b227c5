"""What is peculiar to Adam and AdamW in DeepSpeed."""

from __future__ import annotations

from typing import Final

import attrs

from zerotune.optim.arguments import Filled
from zerotune.optim.requests import SECTION, Request
from zerotune.optim.situation import Situation

_DECAY_SPELLINGS: Final = ("adamw_mode", "decoupled_weight_decay")
_ADAM: Final = frozenset({"Adam", "AdamW"})


def respell_decay(request: Request, log: Filled) -> Request:
    """DeepSpeed's classes and torch spell ``adam_w_mode`` in their own ways."""
    params = dict(request.params)
    if request.entry.name not in _ADAM:
        return request
    for spelling in _DECAY_SPELLINGS:
        if spelling in params:
            value = params.pop(spelling)
            log.record(
                f"{SECTION}.{spelling}",
                value,
                None,
                "DeepSpeed's configuration calls it adam_w_mode",
            )
            params.setdefault("adam_w_mode", value)
    name = request.name
    if name.implementation and params.get("adam_w_mode") is False:
        # FusedAdam(adam_w_mode=False) is L2 Adam, and AdamW would ignore the switch.
        name = attrs.evolve(name, canonical="Adam")
    return attrs.evolve(request, name=name, params=params)


def keep_decay_meaning(request: Request, filled: Filled) -> None:
    """``Adam`` and ``adam_w_mode`` mean in DeepSpeed what few people expect."""
    values, entry = filled.values, request.entry
    key = f"{SECTION}.adam_w_mode"
    if entry.name == "AdamW" and values["adam_w_mode"] is False:
        values["adam_w_mode"] = True
        filled.record(
            key,
            False,
            True,
            "adam_w_mode has no effect on AdamW, whose decay is decoupled; write type Adam with "
            "adam_w_mode false for L2 decay",
            "warning",
        )
    if entry.name != "Adam" or "adam_w_mode" not in filled.defaulted:
        return
    filled.defaulted.discard("adam_w_mode")
    if request.name.origin == "torch":
        values["adam_w_mode"] = False
        filled.record(key, None, False, "torch.optim.Adam decays weights by L2")
        return
    filled.record(
        key,
        None,
        True,
        "DeepSpeed's Adam runs AdamW's decoupled decay unless adam_w_mode is false; write type "
        "AdamW, or adam_w_mode false for Adam's L2 decay",
        # Without decay the two are the same algorithm.
        "warning" if values["weight_decay"] > 0 else "note",
    )


def match_bf16_states(situation: Situation, filled: Filled) -> None:
    """Say what DeepSpeed does anyway when the plan keeps optimizer states in bf16."""
    if situation.bf16_states and filled.values.get("fp32_optimizer_states"):
        explicit = "fp32_optimizer_states" not in filled.defaulted
        filled.defaulted.discard("fp32_optimizer_states")
        filled.values["fp32_optimizer_states"] = False
        filled.record(
            f"{SECTION}.fp32_optimizer_states",
            True if explicit else None,
            False,
            "bf16.bf16_optimizer_states keeps the states in bf16",
            "warning" if explicit else "note",
        )
