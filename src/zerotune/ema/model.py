"""``EMAModel``: a replacement for diffusers' class of the same name, based on ``EMAShadow``."""

from __future__ import annotations

import tempfile
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist

from zerotune._util.files import sync, system_errors
from zerotune.backend.deepspeed.external import is_deepspeed, master_weights_of, unwrapped
from zerotune.backend.distributed import together
from zerotune.backend.master_weights import MasterWeights, full_shape
from zerotune.ema.decay import RampDecay, WarmupDecay
from zerotune.ema.shadow import DeviceStore, EMAShadow, HostStore, ShadowStore
from zerotune.errors import EMAError, InvalidValueError

if TYPE_CHECKING:
    from typing_extensions import Self


Parameters = Iterable[torch.nn.Parameter]

_SETTINGS = {
    "decay": (float, int),
    "min_decay": (float, int),
    "update_after_step": (int,),
    "use_ema_warmup": (bool,),
    "inv_gamma": (float, int),
    "power": (float, int),
}


class EMAModel:
    """A replacement for ``diffusers.training_utils.EMAModel`` that supports all ZeRO stages.

    In a script without DeepSpeed, only the import changes. With DeepSpeed, the fp32 weights belong
    to the engine, so the constructor receives the engine instead of the parameters::

        unet, optimizer, ... = accelerator.prepare(unet, optimizer, ...)
        ema_unet = EMAModel(unet, decay=0.9999, model_cls=..., model_config=...)
        ...
        ema_unet.step(unet.parameters())

    Names and semantics match those of diffusers, except for the differences listed on the EMA page
    of the documentation. The shadow is always fp32, starts on the CPU, and averages only trainable
    parameters; frozen parameters are copied from the model. Unlike in diffusers, a mismatch in the
    number or shapes of the parameters always raises an error. Under ZeRO, all methods except
    ``step`` and ``store`` are collective; if a rank omits a call, an error names that rank.

    Args:
        parameters: Parameters, a module, a zerotune engine or a ``deepspeed.DeepSpeedEngine``.
        decay: Largest decay.
        min_decay: Smallest decay after the first update.
        update_after_step: Number of initial steps during which the shadow is a copy of the weights.
        use_ema_warmup: Use ``WarmupDecay`` instead of ``RampDecay``.
        inv_gamma: Passed to ``WarmupDecay`` as ``inverse_gamma``.
        power: ``WarmupDecay.power``.
        foreach: Ignored; accepted for compatibility with diffusers.
        model_cls: A diffusers model class, for ``save_pretrained``.
        model_config: Configuration of the model, for ``save_pretrained``.
        store: Storage of the shadow; by default host memory.
        legacy: Deprecated arguments of diffusers, accepted with a ``FutureWarning``: ``max_value``
            (now ``decay``), ``min_value`` (now ``min_decay``) and ``device`` (now ``to(device)``).

    Raises:
        InvalidValueError: A setting is out of range or unknown.
        EMAError: The parameters are not the fp32 weights, or no parameter is trainable.
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
        **legacy: Any,
    ) -> None:
        old = _legacy(legacy)
        self.decay, self.min_decay = old.get("decay", decay), old.get("min_decay", min_decay)
        self.update_after_step, self.use_ema_warmup = update_after_step, use_ema_warmup
        self.inv_gamma, self.power, self.foreach = inv_gamma, power, foreach
        self.model_cls, self.model_config = model_cls, model_config
        self.cur_decay_value: float | None = None
        self.get_decay(1)
        self._tracked = TrackedParameters.of(parameters)
        self._frozen = self._frozen_now()
        self._stored: list[torch.Tensor] | dict[str, torch.Tensor] | None = None
        self._shadow = EMAShadow(decay=_Settings(self), store=store).attach(self._tracked.master)
        if "device" in old:
            self.to(device=old["device"])

    def follow(self, source: Any) -> None:
        """Switch the EMA to the weights of ``source``, the model's engine. Collective.

        Use ``follow`` in a script that creates its EMA before ``prepare``. The script may create
        the EMA from the model or, as diffusers' scripts do, from a copy of the model. The EMA
        starts from the values with which it was created. If the EMA was created from the engine,
        ``follow`` has no effect.

        Raises:
            EMAError: The engine's parameters have different shapes, or the EMA has already taken
                steps.
        """
        tracked, copied = TrackedParameters.of(source), None
        if not tracked.are(self._tracked.parameters):
            if not self._tracked.are_masters or not tracked.alike(self._tracked.parameters):
                raise EMAError(
                    "the EMAModel's parameters do not match the engine's parameters",
                    key="EMAModel.follow",
                    fix="create the EMAModel from the model that is prepared, or from a copy of it",
                )
            copied = self._live()
        if not self._tracked.are_masters:
            return
        if self.optimization_step:
            raise EMAError(
                "has already averaged the model",
                key="EMAModel.optimization_step",
                value=self.optimization_step,
                fix="call follow(engine) before the engine's first step",
            )
        self._tracked = tracked
        self._frozen = self._frozen_now()
        store = self._shadow.store
        self._shadow = EMAShadow(decay=_Settings(self), store=store).attach(tracked.master)
        if copied is not None:
            self.shadow_params = copied

    @property
    def shadow(self) -> EMAShadow:
        """The underlying shadow; provides ``swapped_in``, ``gather``, ``distance`` and more."""
        return self._shadow

    @property
    def optimization_step(self) -> int:
        """Number of optimizer steps that the EMA has counted; can be set."""
        return self._shadow.steps

    @optimization_step.setter
    def optimization_step(self, steps: int) -> None:
        self.load_state_dict({"optimization_step": steps})

    @property
    def shadow_params(self) -> list[torch.Tensor]:
        """Full fp32 EMA weights in parameter order; can be set to tensors of the same shapes.

        If the EMA was created from parameters, these are the shadow's own tensors, which later
        updates modify, as in diffusers. If it was created from an engine or is in a file, these are
        CPU copies, which need as much memory as the whole model.
        """
        if self._tracked.are_masters:
            return self._live()
        self._all_come("shadow_params")
        by_position = sorted(self._by_position(), key=itemgetter(0))
        return [value.clone() for _, value in by_position]

    @shadow_params.setter
    def shadow_params(self, values: Sequence[torch.Tensor]) -> None:
        self.load_state_dict({"shadow_params": values})

    @property
    def temp_stored_params(self) -> list[torch.Tensor] | None:
        """CPU copies of the weights saved by ``store``, or ``None``; can be set.

        If the EMA was created from an engine, these are this rank's fragments of the weights.
        """
        return list(self._stored.values()) if isinstance(self._stored, dict) else self._stored

    @temp_stored_params.setter
    def temp_stored_params(self, values: Sequence[torch.Tensor] | None) -> None:
        self._stored = None if values is None else list(values)

    def get_decay(self, optimization_step: int) -> float:
        """Return the decay of the update that follows an optimizer step.

        Args:
            optimization_step: Optimizer step, counting from 1.
        """
        schedule: WarmupDecay | RampDecay = RampDecay(decay=self.decay, min_decay=self.min_decay)
        if self.use_ema_warmup:
            schedule = WarmupDecay(
                decay=self.decay,
                inverse_gamma=self.inv_gamma,
                power=self.power,
                min_decay=self.min_decay,
            )
        return schedule.at(optimization_step - self.update_after_step - 1)

    def step(self, parameters: Parameters | None = None) -> None:
        """Update the EMA after one applied optimizer step.

        Args:
            parameters: Parameters of the trained model. Required only if the EMA was created from a
                different object.
        """
        these = self._meant(parameters)
        if not self._tracked.are(these):
            self._tracked.like(these)
            tracked = TrackedParameters.of(these)
            self._shadow.follow(tracked.master)
            self._tracked = tracked
        self._frozen = self._frozen_now()
        self._shadow.step()
        self.cur_decay_value = self.get_decay(self.optimization_step)

    @torch.no_grad()
    def copy_to(self, parameters: Parameters | None = None) -> None:
        """Copy the EMA weights into parameters.

        Args:
            parameters: Target parameters of any dtype; by default those of the trained model.
        """
        given = self._meant(parameters)
        self._all_come("copy_to()")
        if self._tracked.are(given):
            self._write(self._shadow.state_dict())
            return
        self._tracked.like(given)
        for index, value in self._by_position():
            given[index].data.copy_(value)

    @torch.no_grad()
    def store(self, parameters: Parameters | None = None) -> None:
        """Save a copy of the weights for ``restore``; the copy needs 4 bytes per element.

        ``shadow.swapped_in()`` needs no copy.

        Args:
            parameters: Parameters to save; by default those of the trained model.
        """
        given = self._meant(parameters)
        if self._tracked.are(given) and not self._tracked.are_masters:
            read = self._tracked.master.read()
            self._stored = {f.address.key: f.value.to("cpu", copy=True) for f in read}
        else:
            self._stored = [parameter.detach().to("cpu", copy=True) for parameter in given]

    @torch.no_grad()
    def restore(self, parameters: Parameters | None = None) -> None:
        """Restore the weights saved by ``store``.

        Args:
            parameters: The parameters that were passed to ``store``.

        Raises:
            EMAError: No weights are stored, or the stored weights belong to different parameters.
        """
        given, stored = self._meant(parameters), self._stored
        if stored is None:
            raise EMAError(
                "nothing is stored", key="restore()", fix="call store() before copy_to()"
            )
        masters = self._tracked.are(given) and not self._tracked.are_masters
        if isinstance(stored, dict) != masters or (not masters and len(stored) != len(given)):
            raise EMAError(
                "the stored weights belong to different parameters",
                key="restore()",
                fix="pass the same parameters to store() and restore()",
            )
        if isinstance(stored, dict):
            self._all_come("restore()")
            self._write(stored)
        else:
            for parameter, value in zip(given, stored, strict=True):
                parameter.data.copy_(value)
        self._stored = None

    def to(
        self, device: Any = None, dtype: torch.dtype | None = None, non_blocking: bool = False
    ) -> None:
        """Move the shadow to a device.

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
                "is not supported, because with a decay near 1, rounding would keep the shadow "
                "unchanged",
                key="dtype",
                value=str(dtype),
                fix="omit dtype; copy_to() rounds the EMA weights to the model's dtype",
            )
        if device is not None and torch.device(device) != self._shadow.device:
            host = torch.device(device).type == "cpu"
            self._shadow.move(HostStore() if host else DeviceStore(device=torch.device(device)))

    def pin_memory(self) -> None:
        """Do nothing, because updates never copy the shadow to a device."""

    def state_dict(self) -> dict[str, Any]:
        """Return a state with the keys of diffusers' ``state_dict``, and fp32 ``shadow_params``."""
        settings = {name: getattr(self, name) for name in _SETTINGS}
        return {
            **settings,
            "optimization_step": self.optimization_step,
            "shadow_params": self.shadow_params,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state written by this class or by diffusers.

        Args:
            state_dict: The state; all keys are optional.

        Raises:
            InvalidValueError: A setting has the wrong type or is out of range.
            EMAError: The number or the shapes of ``shadow_params`` are wrong; the EMA is unchanged.
        """
        before = {name: getattr(self, name) for name in _SETTINGS}
        values = state_dict.get("shadow_params")
        steps = state_dict.get("optimization_step", self.optimization_step)
        try:
            for name, types in (*_SETTINGS.items(), ("optimization_step", (int,))):
                value = state_dict.get(name, before.get(name, 0))
                if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                    raise InvalidValueError("has the wrong type", key=name, value=value)
            for name in _SETTINGS:
                setattr(self, name, state_dict.get(name, before[name]))
            self.get_decay(1)
            if values is not None:
                self._tracked.like(tuple(values))
        except (InvalidValueError, EMAError):
            self.__dict__.update(before)
            raise
        current: Any = self._shadow.state_dict()
        state = ChainMap({"steps": torch.tensor(steps)}, current)
        if values is not None:
            full = dict(zip(self._tracked.names, values, strict=True))
            for part in self._tracked.master.addresses:
                flat = full[part.name].detach().reshape(-1)
                state[part.key] = flat[part.start : part.stop]
        self._shadow.load_state_dict(state)
        if values is not None:
            self._frozen = {index: values[index].detach().clone() for index in self._frozen}

    def save_pretrained(self, path: str | Path) -> None:
        """Write the EMA weights and settings as a diffusers model folder.

        Rank 0 writes the folder. If the EMA is sharded, all ranks must call ``save_pretrained``,
        and no rank continues before the folder exists.

        Args:
            path: Folder to write.

        Raises:
            EMAError: ``model_cls`` or ``model_config`` is missing, or this rank or rank 0 cannot
                write the folder.
        """
        if self.model_cls is None or self.model_config is None:
            raise EMAError(
                "needs the class and the configuration of the model",
                key="save_pretrained()",
                fix="write EMAModel(..., model_cls=UNet2DModel, model_config=unet.config)",
            )
        model = self.model_cls.from_config(self.model_config)
        settings = {name: getattr(self, name) for name in _SETTINGS}
        model.register_to_config(**settings, optimization_step=self.optimization_step)
        self.copy_to(model.parameters())
        master = self._tracked.master
        # Each replica's own group has one process, so ask torch.distributed for the rank.
        several = dist.is_available() and dist.is_initialized() and master.replicated
        writes = (dist.get_rank() if several else master.group.rank) == 0
        together(
            master.group,
            "EMAModel.save_pretrained()",
            lambda: write_folder(Path(path), model.save_pretrained) if writes else None,
        )

    @classmethod
    def from_pretrained(cls, path: str | Path, model_cls: Any, foreach: bool = False) -> Self:
        """Load a folder written by ``save_pretrained`` of this class or of diffusers.

        Args:
            path: Path to the folder.
            model_cls: A diffusers model class.
            foreach: Ignored; accepted for compatibility with diffusers.
        """
        config = model_cls.load_config(path)
        settings = {k: config[k] for k in (*_SETTINGS, "optimization_step") if k in config}
        model = model_cls.from_pretrained(path)
        ema = cls(model.parameters(), model_cls=model_cls, model_config=model.config)
        ema.foreach = foreach
        ema.load_state_dict(settings)
        return ema

    def _all_come(self, call: str) -> None:
        """Wait for all ranks before anything moves; the error names ranks that did not call."""
        self._tracked.master.group.barrier(f"EMAModel.{call} (every rank must call it)")

    def _meant(self, parameters: Parameters | None) -> tuple[torch.nn.Parameter, ...]:
        if parameters is None:
            return self._tracked.parameters
        if isinstance(parameters, torch.nn.Module):
            return tuple(parameters.parameters())
        return tuple(parameters)

    def _frozen_now(self) -> dict[int, torch.Tensor]:
        trained = self._tracked.master.parameters
        return {
            index: parameter.detach()
            for index, (name, parameter) in enumerate(
                zip(self._tracked.names, self._tracked.parameters, strict=True)
            )
            if not parameter.requires_grad or name not in trained
        }

    def _live(self) -> list[torch.Tensor]:
        averages = self._shadow.state_dict()
        keys = {address.name: address.key for address in self._tracked.master.addresses}
        return [
            self._frozen[index].clone()
            if index in self._frozen
            else averages[keys[name]].view(self._tracked.full_shape(index))
            for index, name in enumerate(self._tracked.names)
        ]

    def _by_position(self) -> Iterator[tuple[int, torch.Tensor]]:
        positions: dict[str, list[int]] = {}
        for index, name in enumerate(self._tracked.names):
            positions.setdefault(name, []).append(index)
        for name, value in self._shadow.gather():
            for index in positions[name]:
                yield index, value
        for index, value in self._frozen.items():
            if value.shape != self._tracked.full_shape(index):
                raise EMAError(
                    "is frozen and partitioned, so it cannot be copied from the model",
                    key=self._tracked.names[index],
                    fix="use ema.shadow.gather(), which yields only trainable parameters",
                )
            yield index, value

    def _write(self, values: Mapping[str, torch.Tensor]) -> None:
        with self._tracked.master.editing() as fragments:
            for fragment in fragments:
                fragment.value.copy_(values[fragment.address.key])
        for index, value in self._frozen.items():
            parameter = self._tracked.parameters[index]
            if value.data_ptr() != parameter.data_ptr():
                parameter.data.copy_(value)


class _Settings:
    """The current schedule of an ``EMAModel``, whose attributes scripts may change at any time."""

    def __init__(self, owner: EMAModel) -> None:
        self._owner = owner

    def at(self, step: int) -> float:
        return self._owner.get_decay(step + 1)

    def __repr__(self) -> str:
        return f"EMAModel(decay={self._owner.decay})"


_LEGACY = {"max_value": "decay", "min_value": "min_decay", "device": "device"}


def _legacy(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments under their current names, with a warning for diffusers' older ones."""
    for name, value in arguments.items():
        if name not in _LEGACY:
            raise InvalidValueError(
                "EMAModel has no such argument",
                key=f"EMAModel({name})",
                value=value,
                fix=f"use one of {', '.join((*_SETTINGS, *_LEGACY))}",
            )
        if value is not None:
            today = "to(device=...)" if name == "device" else _LEGACY[name]
            message = f"EMAModel({name}=...) is deprecated in diffusers; use {today}"
            warnings.warn(message, FutureWarning, stacklevel=3)
    return {_LEGACY[name]: value for name, value in arguments.items() if value is not None}


# -- Parameters in diffusers' order, and the names of their master weights.


@attrs.frozen(kw_only=True, eq=False)
class TrackedParameters:
    """The parameters of an EMA, by position, with access to their master weights."""

    parameters: tuple[torch.nn.Parameter, ...]
    """The parameters, in the order of ``module.parameters()``."""
    names: tuple[str, ...]
    """Names of the parameters in the master weights."""
    master: MasterWeights
    are_masters: bool = False
    """Whether the parameters are the fp32 weights; ``False`` for the parameters of an engine."""

    @classmethod
    def of(cls, source: Any) -> TrackedParameters:
        """Return the parameters of an engine, a module or an iterable of parameters."""
        source = unwrapped(source)
        # A Sequential is iterable too, and yields modules.
        if isinstance(source, torch.nn.Module):
            if not is_deepspeed(source):
                return cls._listed(tuple(source.parameters()))
        elif isinstance(source, Iterable):
            return cls._listed(tuple(source))
        named = list(source.module.named_parameters())
        return cls(
            parameters=tuple(parameter for _, parameter in named),
            names=tuple(name for name, _ in named),
            master=master_weights_of(source),
        )

    @classmethod
    def _listed(cls, parameters: tuple[torch.nn.Parameter, ...]) -> TrackedParameters:
        holder, names = torch.nn.Module(), dict[int, str]()
        for index, parameter in enumerate(parameters):
            half = parameter.requires_grad and parameter.dtype != torch.float32
            if half or full_shape(parameter) != tuple(parameter.shape):
                raise EMAError(
                    "is not one of the fp32 weights that the optimizer updates",
                    key=f"parameters[{index}]",
                    value=(str(parameter.dtype), tuple(parameter.shape)),
                    fix="create EMAModel(engine, ...) once accelerate or DeepSpeed has created the "
                    "engine, or call accelerator.register_for_checkpointing(ema) after prepare",
                )
            if id(parameter) not in names:
                names[id(parameter)] = str(index)
                holder.register_parameter(str(index), parameter)
        return cls(
            parameters=parameters,
            names=tuple(names[id(parameter)] for parameter in parameters),
            master=master_weights_of(holder),
            are_masters=True,
        )

    def full_shape(self, index: int) -> tuple[int, ...]:
        """Return the full, unpartitioned shape of the parameter at a position."""
        return full_shape(self.parameters[index])

    def are(self, parameters: tuple[torch.nn.Parameter, ...]) -> bool:
        """Return whether ``parameters`` are the tracked objects, in the same order."""
        return len(parameters) == len(self.parameters) and all(
            mine is theirs for mine, theirs in zip(self.parameters, parameters, strict=True)
        )

    def alike(self, parameters: tuple[torch.nn.Parameter, ...]) -> bool:
        """Return whether ``parameters`` match the tracked parameters in number and shapes."""
        return [full_shape(p) for p in self.parameters] == [tuple(p.shape) for p in parameters]

    def like(self, parameters: tuple[torch.nn.Parameter, ...]) -> None:
        """Check that ``parameters`` match the tracked parameters in number and shapes."""
        if len(parameters) != len(self.parameters):
            raise EMAError(
                f"there are {len(parameters)} parameters instead of {len(self.parameters)}",
                key="parameters",
                fix="pass the parameters of a model with the same architecture",
            )
        for index, (mine, theirs) in enumerate(zip(self.parameters, parameters, strict=True)):
            if full_shape(mine) != tuple(theirs.shape):
                raise EMAError(
                    f"has shape {tuple(theirs.shape)} instead of {full_shape(mine)}",
                    key=f"parameters[{index}]",
                    fix="pass the parameters of a model with the same architecture",
                )


# -- A folder that is complete or absent.


def write_folder(path: Path, write: Callable[[Path], object]) -> None:
    """Write a folder via a temporary folder, so that it never contains an incomplete file.

    If the folder exists, each new file atomically replaces the file of the same name. Other files
    are kept.

    Args:
        path: Path to the folder.
        write: Function that writes files, but no folders, into the temporary folder passed to it.
    """
    with ExitStack() as opened:
        opened.enter_context(
            system_errors(EMAError, path, "the EMA weights cannot be written to this folder")
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent)
        draft = Path(opened.enter_context(beside)) / path.name
        write(draft)
        files = [file for file in draft.iterdir() if file.is_file()]
        for file in files:
            sync(file)
        if path.exists():
            for file in files:
                file.replace(path / file.name)
        else:
            draft.rename(path)
        sync(path)
        sync(path.parent)
