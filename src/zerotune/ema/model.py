"""``EMAModel``: what diffusers' training scripts use of its class of the same name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from zerotune.backend.deepspeed.external import is_deepspeed, unwrapped
from zerotune.backend.master_weights import full_shape
from zerotune.ema.decay import DecaySchedule, RampDecay, WarmupDecay
from zerotune.ema.shadow import EMAShadow
from zerotune.ema.stores import DeviceStore, HostStore, ShadowStore
from zerotune.errors import EMAError, InvalidValueError


class EMAModel:
    """``diffusers.training_utils.EMAModel`` for weights that an engine trains, at all ZeRO stages.

    A script may create the EMA from the model's parameters or, as diffusers' scripts do, from those
    of a copy. It needs no memory until it follows trained weights: those of an engine, which the
    constructor or ``follow`` receives, or else those passed to ``step``. The first update copies
    these weights, as in diffusers::

        unet, optimizer, ... = accelerator.prepare(unet, optimizer, ...)
        ema_unet = EMAModel(unet, decay=0.9999)
        ...
        ema_unet.step(unet.parameters())

    The EMA is always fp32, starts on the CPU, and contains only trainable parameters. Checkpoints
    and exports take its ``shadow``. Under ZeRO, ``copy_to`` and ``restore`` are collective; if a
    rank omits a call, an error names that rank.

    Args:
        parameters: Parameters, a module, a zerotune engine or a ``deepspeed.DeepSpeedEngine``.
        decay: Largest decay.
        min_decay: Smallest decay after the first update.
        update_after_step: Number of initial steps during which the EMA is a copy of the weights.
        use_ema_warmup: Use ``WarmupDecay`` instead of ``RampDecay``.
        inv_gamma: Passed to ``WarmupDecay`` as ``inverse_gamma``.
        power: ``WarmupDecay.power``.
        foreach: Ignored, as are ``model_cls`` and ``model_config``; accepted for compatibility.
        model_cls: Ignored.
        model_config: Ignored.
        store: Storage of the EMA; by default host memory.

    Attributes:
        shadow: The ``EMAShadow``, which provides ``swapped_in``, ``gather``, ``distance`` and more.

    Raises:
        InvalidValueError: A setting is out of range.
        EMAError: The engine has no trainable parameter.
    """

    def __init__(
        self,
        parameters: Any,
        decay: float = 0.9999,
        min_decay: float = 0.0,
        update_after_step: int = 0,
        use_ema_warmup: bool = False,
        inv_gamma: float = 1.0,
        power: float = 2 / 3,
        foreach: bool = False,
        model_cls: Any | None = None,
        model_config: Any | None = None,
        *,
        store: ShadowStore | None = None,
    ) -> None:
        del foreach, model_cls, model_config
        schedule: DecaySchedule = RampDecay(decay=decay, min_decay=min_decay)
        if use_ema_warmup:
            schedule = WarmupDecay(
                decay=decay, inverse_gamma=inv_gamma, power=power, min_decay=min_decay
            )
        self._schedule, self._update_after_step = schedule, update_after_step
        self.shadow = EMAShadow(decay=schedule, start_after=update_after_step, store=store)
        self._parameters = _parameters_of(parameters)
        self._stored: dict[str, torch.Tensor] | None = None
        if _has_engine(parameters):
            self.follow(parameters)

    def follow(self, source: Any) -> None:
        """Follow the weights of an engine, or other fp32 weights, from now on. Collective.

        Args:
            source: The engine, or anything else that the constructor accepts.

        Raises:
            EMAError: The parameters have different shapes, are not the weights that the optimizer
                updates, or the EMA already follows others.
        """
        given = _parameters_of(source)
        if self.shadow.attached:
            self._check_followed(given, "follow()")
            return
        shapes = [full_shape(each) for each in given]
        if shapes != [full_shape(each) for each in self._parameters]:
            raise EMAError(
                "the EMA was created from parameters of other shapes",
                "create it from the model that is trained, or from a copy of it",
                "EMAModel.follow()",
                f"{len(given)} parameters, {len(self._parameters)} of the EMA",
            )
        self.shadow.attach(source if _has_engine(source) else _holder_of(given))
        self._parameters = given

    @property
    def optimization_step(self) -> int:
        """Number of optimizer steps that the EMA has counted."""
        return self.shadow.steps

    @property
    def cur_decay_value(self) -> float | None:
        """Decay of the latest step; ``None`` before the first step."""
        return self.shadow.decay if self.shadow.steps else None

    def get_decay(self, optimization_step: int) -> float:
        """Return the decay of the update that follows an optimizer step.

        Args:
            optimization_step: Optimizer step, counting from 1.
        """
        return self._schedule.at(optimization_step - self._update_after_step - 1)

    def step(self, parameters: Iterable[torch.nn.Parameter] | None = None) -> None:
        """Update the EMA after one applied optimizer step.

        Args:
            parameters: Parameters of the trained model; by default those that the EMA follows, or
                else those from which it was created.
        """
        self.follow(self._parameters if parameters is None else parameters)
        self.shadow.step()

    @torch.no_grad()
    def copy_to(self, parameters: Iterable[torch.nn.Parameter] | None = None) -> None:
        """Copy the EMA weights into the trained model.

        Args:
            parameters: Parameters of the trained model.
        """
        self._check_followed(parameters, "copy_to()")
        self._write(self.shadow.state_dict(), "copy_to()")

    @torch.no_grad()
    def store(self, parameters: Iterable[torch.nn.Parameter] | None = None) -> None:
        """Save a copy of the trained weights for ``restore``; the copy needs 4 bytes per element.

        ``shadow.swapped_in()`` needs no copy.

        Args:
            parameters: Parameters of the trained model.
        """
        self._check_followed(parameters, "store()")
        read = self.shadow.source.read()
        self._stored = {each.address.key: each.value.to("cpu", copy=True) for each in read}

    @torch.no_grad()
    def restore(self, parameters: Iterable[torch.nn.Parameter] | None = None) -> None:
        """Restore the weights saved by ``store``.

        Args:
            parameters: Parameters of the trained model.

        Raises:
            EMAError: No weights are stored, or the EMA follows other parameters.
        """
        self._check_followed(parameters, "restore()")
        if self._stored is None:
            raise EMAError("nothing is stored", "call store() before copy_to()", "restore()")
        self._write(self._stored, "restore()")
        self._stored = None

    def to(
        self, device: Any = None, dtype: torch.dtype | None = None, non_blocking: bool = False
    ) -> None:
        """Move the EMA to a device.

        Args:
            device: The device.
            dtype: ``torch.float32`` or ``None``.
            non_blocking: Ignored.

        Raises:
            InvalidValueError: ``dtype`` is not fp32. In bf16, most EMA updates would be lost to
                rounding.
        """
        del non_blocking
        if dtype not in (None, torch.float32):
            raise InvalidValueError(
                "is not supported, because with a decay near 1, rounding would keep the EMA "
                "unchanged",
                "omit dtype; copy_to() rounds the EMA weights to the model's dtype",
                "dtype",
                str(dtype),
            )
        if device is not None and torch.device(device) != self.shadow.device:
            host = torch.device(device).type == "cpu"
            self.shadow.move(HostStore() if host else DeviceStore(device=torch.device(device)))

    def pin_memory(self) -> None:
        """Do nothing, because updates never copy the EMA to a device."""

    def _check_followed(self, parameters: Any, call: str) -> None:
        if parameters is None:
            return
        given = _parameters_of(parameters)
        if [*map(id, given)] != [*map(id, self._parameters)]:
            raise EMAError(
                "these are not the parameters that the EMA follows",
                "pass the parameters of the trained model; to write others, call "
                "export_model(weights=ema.shadow)",
                f"EMAModel.{call}",
            )

    def _write(self, values: Mapping[str, torch.Tensor], call: str) -> None:
        """Set the trained weights to these fragments, once all ranks have made the call."""
        master = self.shadow.source
        master.group.barrier(f"EMAModel.{call} (every rank must call it)")
        with master.editing() as fragments:
            for fragment in fragments:
                fragment.value.copy_(values[fragment.address.key])


def _has_engine(source: Any) -> bool:
    return hasattr(source, "master_weights") or is_deepspeed(unwrapped(source))


def _parameters_of(source: Any) -> tuple[torch.nn.Parameter, ...]:
    whole = unwrapped(source)
    whole = whole.module if _has_engine(whole) else whole
    given = whole.parameters() if isinstance(whole, torch.nn.Module) else whole
    return tuple(dict.fromkeys(given))


def _holder_of(parameters: Iterable[torch.nn.Parameter]) -> torch.nn.Module:
    """Return a module of parameters, which must be the weights that the optimizer updates."""
    holder = torch.nn.Module()
    for index, parameter in enumerate(parameters):
        half = parameter.requires_grad and parameter.dtype != torch.float32
        if half or full_shape(parameter) != tuple(parameter.shape):
            raise EMAError(
                "is not one of the fp32 weights that the optimizer updates",
                "create EMAModel(engine, ...) once accelerate or DeepSpeed has created the "
                "engine, or call accelerator.register_for_checkpointing(ema) after prepare",
                f"parameters[{index}]",
                (str(parameter.dtype), tuple(parameter.shape)),
            )
        holder.register_parameter(str(index), parameter)
    return holder
