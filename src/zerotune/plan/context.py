"""The context in which a plan runs: machine, model, run, and options of the host engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, Literal, cast, get_args

import attrs

from zerotune._util.text import as_texts, is_number, parse_size, whole
from zerotune.errors import InvalidValueError, UnresolvedPlanError
from zerotune.plan.facts import ModelFacts
from zerotune.platform.facts import Platform

EngineName = Literal["host", "deepspeed"]
"""Engine of an Adam in host memory: zerotune's host engine, or DeepSpeed's."""
MastersName = Literal["fp32", "split", "stochastic"]
"""How the host engine stores fp32 master weights; see ``DeviceUpdate.masters``."""
UpdateName = Literal["host", "device", "device:split", "device:stochastic"]
"""Where the host engine updates weights; on the device, with the masters after the colon."""
UPDATES: Final[tuple[UpdateName, ...]] = get_args(UpdateName)


@attrs.frozen(kw_only=True)
class RunFacts:
    """Values from a training script for configuration keys that are ``"auto"``."""

    lr: float | None = None
    """Peak learning rate, dimensionless."""
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    micro_batch_size: int | None = None
    """Samples per forward pass and rank."""
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float | None = None
    """Maximum global L2 norm of the gradient; 0 disables clipping."""
    mixed_precision: str | None = None
    """``"bf16"``, ``"fp16"`` or ``"fp32"``."""
    total_steps: int | None = None
    """Number of optimizer steps in the whole run."""
    warmup_steps: int | None = None
    """Length of the warm-up in optimizer steps."""

    @classmethod
    def from_arguments(cls, arguments: Any) -> RunFacts:
        """Read the flags that a training script shares with diffusers' scripts.

        For example, ``--learning_rate`` replaces an ``lr`` of ``"auto"``. A fact stays ``None`` if
        its flag is missing or ``None``.

        Args:
            arguments: An ``argparse.Namespace``, or an object with the same attributes.

        Raises:
            InvalidValueError: A value does not have the type that its flag has in diffusers'
                scripts.
        """
        given = {
            fact: _flag(arguments, name, kind)
            for fact, (name, kind) in _SCRIPT_FLAGS.items()
            if getattr(arguments, name, None) is not None
        }
        ends = [_flag(arguments, f"adam_beta{number}", float) for number in (1, 2)]
        if None not in ends:
            given["betas"] = tuple(ends)
        if given.get("mixed_precision") == "no":
            given["mixed_precision"] = "fp32"
        return cls(**given)


_SCRIPT_FLAGS: Final[Mapping[str, tuple[str, type]]] = {
    "lr": ("learning_rate", float),
    "weight_decay": ("adam_weight_decay", float),
    "eps": ("adam_epsilon", float),
    "micro_batch_size": ("train_batch_size", int),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", int),
    "gradient_clipping": ("max_grad_norm", float),
    "mixed_precision": ("mixed_precision", str),
    "total_steps": ("max_train_steps", int),
    "warmup_steps": ("lr_warmup_steps", int),
}
"""For each fact, the flag of diffusers' scripts that sets it, and its type."""


def _flag(arguments: Any, name: str, kind: type) -> Any:
    value = getattr(arguments, name, None)
    fits = is_number(value) if kind is float else isinstance(value, kind)
    if value is None or (fits and not isinstance(value, bool)):
        return value
    raise InvalidValueError(
        f"is not of type {kind.__name__}",
        "pass RunFacts(...) instead if this flag of the script has a different meaning",
        f"arguments.{name}",
        value,
    )


def _check_world_size(_instance: object, _attribute: Any, value: Any) -> None:
    whole(value, key="world_size", fix="pass the number of processes that train together")


@attrs.frozen(kw_only=True)
class Context:
    """Machine, model and run for which a plan is checked."""

    world_size: int = attrs.field(default=1, validator=_check_world_size)
    platform: Platform | None = None
    model: ModelFacts | None = None
    run: RunFacts = attrs.field(factory=RunFacts)
    uses_deepspeed: bool = True
    """``False`` for the plain engine; ZeRO settings are then ignored."""
    schema: Mapping[str, Any] | None = None
    """Schema of DeepSpeed's keys; ``None`` uses the stored copy."""

    @property
    def machine(self) -> Platform:
        """The platform; raises an error if it is unknown."""
        if self.platform is None:
            raise UnresolvedPlanError(
                "the machine is unknown",
                "pass zerotune.platform.detect_platform(), or a Platform.synthetic(…)",
                "platform",
            )
        return self.platform


def _check_switch(_instance: object, attribute: Any, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidValueError(
            "must be true or false", "write True", f"streamed.{attribute.name}", value
        )


def _as_memory(size: int | float | str | None) -> int | None:
    return None if size is None else parse_size(size, key="streamed.memory")


@attrs.frozen(kw_only=True)
class Streaming:
    """Options for streaming weights: units, device memory, master weights and gradient buffers."""

    units: tuple[str, ...] = attrs.field(default=(), converter=as_texts)
    """Class names or dotted names of modules that are each streamed as one unit; by default the
    model's repeated blocks."""
    window: int = attrs.field(default=3)
    """Device memory for units, as a multiple of the size of the largest unit."""
    memory: int | None = attrs.field(default=None, converter=_as_memory)
    """Device memory for units, such as ``"6GiB"``, instead of ``window``; at least twice the
    largest unit."""
    split_masters: bool = attrs.field(default=False, kw_only=True, validator=_check_switch)
    """Whether each master weight is stored as the bf16 weight and the remaining 16 bits. This saves
    2 bytes of host memory per trained weight, like ``store_param_remainders`` in Apex and
    Transformer Engine. Weights exactly halfway between two bf16 numbers (one in 131,072) may change
    by one unit in the last place."""
    gradient_buffers: int = attrs.field(default=6)
    """Number of units whose gradients may be in host memory at the same time. The limit applies if
    updates run during the backward pass, that is, without clipping and accumulation. One buffer
    receives gradients, and one is used by an update. The others keep gradients for updates during
    the next forward pass, so more buffers let more work overlap."""

    @gradient_buffers.validator
    def _check_buffers(self, _attribute: Any, value: Any) -> None:
        fix = "write 6: one being filled, one being read, and four kept for the next forward pass"
        whole(value, key="streamed.gradient_buffers", least=1, fix=fix)

    @window.validator
    def _check_window(self, _attribute: Any, value: Any) -> None:
        fix = "write 3: one in use, one being loaded, and one being released"
        whole(value, key="streamed.window", least=2, fix=fix)

    def to_dict(self) -> dict[str, Any]:
        """Return the options that differ from the defaults, as the file of a run names them."""
        defaults, values = attrs.asdict(Streaming()), attrs.asdict(self)
        return {name: value for name, value in values.items() if value != defaults[name]}

    def capacity(self, sizes: Collection[int]) -> int:
        """Return the bytes of device memory that units may use at the same time.

        Args:
            sizes: Size of each unit in bytes.
        """
        largest = max(sizes, default=0)
        wanted = self.window * largest
        if self.memory is not None:
            # The backward pass enters a unit before it has left the previous one.
            wanted = max(self.memory, 2 * largest)
        if len(set(sizes)) == 1:
            wanted -= wanted % largest
        return min(wanted, sum(sizes))


@attrs.frozen(kw_only=True)
class DeviceUpdate:
    """Options for updating weights on the device, by the code of any optimizer, unit by unit."""

    masters: MastersName = attrs.field(default="fp32")
    """What host memory keeps of each master weight beside the bf16 weight: ``"fp32"`` all of it;
    ``"split"`` its low 16 bits, exact but for ties, as ``Streaming.split_masters``;
    ``"stochastic"`` nothing: weights are rounded to bf16 at random."""

    @masters.validator
    def _check_masters(self, _attribute: Any, value: Any) -> None:
        if value not in get_args(MastersName):
            raise InvalidValueError(
                "is no way to store master weights; rounding to the nearest bf16 weight would "
                "lose most updates",
                'write "fp32", "split" or "stochastic"',
                "update.masters",
                value,
            )

    @classmethod
    def of(cls, wanted: UpdateName | DeviceUpdate | None) -> DeviceUpdate | None:
        """Return the options of an update on the device; ``None`` for an update on the host.

        Args:
            wanted: Where to update, or options.

        Raises:
            InvalidValueError: The value names no place.
        """
        if isinstance(wanted, cls):
            return wanted
        if wanted in (None, "host"):
            return None
        if wanted in UPDATES:
            masters: Any = str(wanted).partition(":")[2] or "fp32"
            return cls(masters=masters)
        raise InvalidValueError(
            "is no place for the update", f"write one of {', '.join(UPDATES)}", "update", wanted
        )

    @property
    def name(self) -> UpdateName:
        """Name from which ``of`` returns these options."""
        name: Any = "device" if self.masters == "fp32" else f"device:{self.masters}"
        return cast(UpdateName, name)
