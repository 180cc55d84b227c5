"""Settings of trainers' files (Hugging Face's TrainingArguments, axolotl, SimpleTuner) in a plan.

Values fill ``"auto"`` as in ``HfTrainerDeepSpeedConfig`` of transformers 5. Settings for which the
DeepSpeed configuration has no place are reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs

from zerotune._util.text import as_number
from zerotune.decisions import Log
from zerotune.errors import OptimizerError, PlanConflictError, PlanError
from zerotune.plan.optimizer.names import DEFAULT_OPTIMIZER, parse_optimizer_name
from zerotune.plan.sections import OptimizerSection
from zerotune.plan.settings import Settings
from zerotune.plan.source import MICRO_KEYS, TRAINER_KEYS, WRAPPERS, undashed
from zerotune.plan.values import AUTO, is_auto

_BETAS: Final = {"adam_beta1": 0.9, "adam_beta2": 0.999}
_PLACES: Final = {
    "learning_rate": ("optimizer.lr", "scheduler.warmup_max_lr"),
    "weight_decay": ("optimizer.weight_decay",),
    "adam_weight_decay": ("optimizer.weight_decay",),
    "adam_epsilon": ("optimizer.eps",),
    **dict.fromkeys(_BETAS, ("optimizer.betas",)),
    "warmup_steps": ("scheduler.warmup_num_steps",),
    "lr_warmup_steps": ("scheduler.warmup_num_steps",),
    "max_steps": ("scheduler.total_num_steps",),
    "max_train_steps": ("scheduler.total_num_steps",),
}
"""Keys of trainers' files, and the arguments that each sets."""
_OPTIMIZER_KEYS: Final = ("optim", "optimizer")
_SCHEDULER_KEYS: Final = ("lr_scheduler_type", "lr_scheduler", "warmup_ratio")
_FLAGS: Final = ("bf16", "fp16")
_DEFAULTS: Final = {"optimizer.lr": 5e-5, "optimizer.weight_decay": 0.0}
"""Values with which Hugging Face's trainer fills ``"auto"`` if its file sets none, where they
differ from zerotune's."""


def precision_flags(config: Mapping[Any, Any]) -> dict[str, str]:
    """Return the keys ``bf16`` and ``fp16`` of a trainer's file that are set, by their name."""
    return {
        undashed(key): key
        for key, value in config.items()
        if undashed(key) in _FLAGS and isinstance(value, bool | str)
    }


def flagged_precision(config: Mapping[Any, Any]) -> str | None:
    """Return the precision that ``bf16`` and ``fp16`` of a trainer's file request, if any."""
    flags = precision_flags(config)
    words = {name: str(config[key]).strip().lower() for name, key in flags.items()}
    on = [name for name, word in words.items() if word in ("true", "yes", "1", "full")]
    if len(on) > 1:
        raise PlanConflictError(
            "bf16 is on too, but a run has only one precision",
            "turn one of the two off",
            flags["fp16"],
            config[flags["fp16"]],
        )
    if on:
        return on[0]
    return AUTO if AUTO in words.values() else "no" if words else None


@attrs.frozen(kw_only=True)
class TrainerSettings:
    """Settings of a trainer's file outside its DeepSpeed configuration."""

    config: Mapping[Any, Any]
    wrapper: str
    """Key of the DeepSpeed configuration."""
    log: Log

    def fill(self, plan: Settings, source: str) -> Settings:
        """Return the plan with the trainer's values, and report the settings that are not read.

        Args:
            plan: The plan in the file.
            source: Name of the file.
        """
        values = dict(self._values())
        read = {*WRAPPERS, *TRAINER_KEYS, *MICRO_KEYS, *precision_flags(self.config)}
        if plan.optimizer is None and "optimizer.lr" in values:
            plan = attrs.evolve(plan, optimizer=self._optimizer(values))
            read |= {*_OPTIMIZER_KEYS}
        for section in ("optimizer", "scheduler"):
            plan = self._filled(plan, section, values, read)
        self._report(plan, read, source)
        return plan

    def _values(self) -> Iterator[tuple[str, tuple[str, Any]]]:
        """Yield place, key and value of each number that a plan has a place for."""
        numbers = {undashed(key): (key, as_number(value)) for key, value in self.config.items()}
        numbers = {name: pair for name, pair in numbers.items() if pair[1] is not None}
        for name, places in _PLACES.items():
            key, number = numbers.get(name, ("", None))
            if number is None or (name in ("max_steps", "max_train_steps") and number < 1):
                continue
            value: Any = number
            if name in _BETAS:
                value = [numbers.get(each, ("", _BETAS[each]))[1] for each in _BETAS]
            if places == ("scheduler.warmup_num_steps",):
                if 0 < number < 1:
                    continue  # a share of a length that the file may not state
                value = max(1, int(number))
            yield from ((place, (key, value)) for place in places)

    def _optimizer(self, values: dict[str, tuple[str, Any]]) -> OptimizerSection:
        """Return the optimizer that the trainer creates itself."""
        params = {
            place.partition(".")[2]: value
            for place, (_, value) in values.items()
            if place.startswith("optimizer.")
        }
        key = next((key for key in self.config if undashed(key) in _OPTIMIZER_KEYS), None)
        name = DEFAULT_OPTIMIZER if key is None else self.config[key]
        try:
            name = parse_optimizer_name(name, key=str(key)).canonical
        except (PlanError, OptimizerError) as error:
            name = DEFAULT_OPTIMIZER
            self.log.warn(str(key), f"{error.reason}; the plan uses {name}", error.fix or "")
        reason = "the configuration has no optimizer, so the trainer creates this one"
        self.log.decide("optimizer", None, {"type": name, "params": params}, reason)
        return OptimizerSection(type=name, params=params)

    def _filled(
        self, plan: Settings, name: str, values: dict[str, tuple[str, Any]], read: set[str]
    ) -> Settings:
        """Fill ``"auto"`` in the optimizer or the scheduler; numbers take precedence."""
        section = getattr(plan, name)
        params = dict(section.params or {}) if section else {}
        for argument, written in params.items():
            place, path = f"{name}.{argument}", f"{name}.params.{argument}"
            key, value = values.get(place, ("", None))
            if key:
                read |= {each for each, places in _PLACES.items() if place in places}
            elif undashed(self.wrapper) == "deepspeed" and is_auto(written):
                value = _DEFAULTS.get(place)
            if value is None or written == value:
                continue
            if is_auto(written):
                params[argument] = value
                source = f"the trainer's {undashed(key)}" if key else "the trainer's default"
                self.log.decide(path, written, value, f"{source} fills {AUTO!r}")
                self.log.names.update({path: key} if key else {})
            else:
                why = f"numbers in the configuration take precedence over {key}"
                self.log.decide(path, value, written, why, "warning")
        return attrs.evolve(plan, **{name: attrs.evolve(section, params=params)} if params else {})

    def _report(self, plan: Settings, read: set[str], source: str) -> None:
        """Report the settings that the plan does not contain."""
        left = {
            key: value
            for key, value in self.config.items()
            if undashed(key) not in read and not str(key).startswith("_") and value is not None
        }
        sections = {
            **dict.fromkeys((*_PLACES, *_OPTIMIZER_KEYS), plan.optimizer),
            **dict.fromkeys(_SCHEDULER_KEYS, plan.scheduler),
        }
        for key in [key for key in left if undashed(key) in sections]:
            if undashed(key) in _PLACES or sections[undashed(key)] is None:
                why = "not read: the DeepSpeed configuration has no place for it"
                self.log.decide(str(key), left.pop(key), None, why, "warning")
        if left:
            why = "not read: a plan has no place for them; set them in your script"
            self.log.decide(source, ", ".join(map(str, left)), None, why)
