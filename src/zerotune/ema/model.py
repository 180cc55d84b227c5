"""``EMAModel``: the interface of diffusers' class of the same name, on top of ``EMAShadow``."""

from __future__ import annotations

import tempfile
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from typing_extensions import override

from zerotune._util.files import sync, system_errors
from zerotune._util.text import whole
from zerotune.backend.deepspeed.external import is_deepspeed, master_weights_of, unwrapped
from zerotune.backend.distributed import together
from zerotune.backend.master_weights import MasterWeights, full_shape
from zerotune.ema.decay import DecaySchedule, RampDecay, WarmupDecay
from zerotune.ema.shadow import EMAShadow
from zerotune.ema.stores import DeviceStore, HostStore, ShadowStore
from zerotune.errors import EMAError, InvalidValueError

if TYPE_CHECKING:
    from typing_extensions import Self

_SETTINGS = ("decay", "min_decay", "update_after_step", "use_ema_warmup", "inv_gamma", "power")


class EMAModel:
    """``diffusers.training_utils.EMAModel`` for all ZeRO stages, based on an ``EMAShadow``.

    In a script without DeepSpeed, only the import changes. With DeepSpeed, the fp32 weights belong
    to the engine, so the constructor receives the engine instead of the parameters::

        unet, optimizer, ... = accelerator.prepare(unet, optimizer, ...)
        ema_unet = EMAModel(unet, decay=0.9999, model_cls=..., model_config=...)
        ...
        ema_unet.step(unet.parameters())

    It has what diffusers' training scripts use; the EMA page of the documentation lists the
    differences. The EMA is always fp32, starts on the CPU, and contains only trainable parameters;
    frozen parameters are copied from the model. Unlike in diffusers, a mismatch in the number or
    shapes of the parameters always raises an error. Under ZeRO, all methods except ``step`` and
    ``store`` are collective; if a rank omits a call, an error names that rank.

    Args:
        parameters: Parameters, a module, a zerotune engine or a ``deepspeed.DeepSpeedEngine``.
        decay: Largest decay.
        min_decay: Smallest decay after the first update.
        update_after_step: Number of initial steps during which the EMA is a copy of the weights.
        use_ema_warmup: Use ``WarmupDecay`` instead of ``RampDecay``.
        inv_gamma: Passed to ``WarmupDecay`` as ``inverse_gamma``.
        power: ``WarmupDecay.power``.
        foreach: Ignored; accepted for compatibility with diffusers.
        model_cls: A diffusers model class, for ``save_pretrained``.
        model_config: Configuration of the model, for ``save_pretrained``.
        store: Storage of the EMA; by default host memory.

    Attributes:
        shadow: The ``EMAShadow``, which provides ``swapped_in``, ``gather``, ``distance`` and more.
        cur_decay_value: Decay of the latest step; ``None`` before the first step.

    Raises:
        InvalidValueError: A setting is out of range.
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
    ) -> None:
        del foreach
        self.decay, self.min_decay = decay, min_decay
        self.update_after_step, self.use_ema_warmup = update_after_step, use_ema_warmup
        self.inv_gamma, self.power = inv_gamma, power
        self.model_cls, self.model_config = model_cls, model_config
        self.cur_decay_value: float | None = None
        self._stored: dict[str, torch.Tensor] | None = None
        self.get_decay(1)  # raises an error for settings out of range
        self._track(_weights_of(parameters), store)

    def _track(self, weights: _Weights, store: ShadowStore | None) -> None:
        self._index, self._parameters, self._master = weights
        self.shadow = EMAShadow(decay=self, store=store).attach(self._master)

    def follow(self, source: Any) -> None:
        """Continue the EMA with the weights of another model. Collective.

        Use ``follow`` in a script that creates its EMA before ``prepare``. The script may create
        the EMA from the model or, as diffusers' scripts do, from a copy of the model.

        Args:
            source: The engine, or anything else that the constructor accepts.

        Raises:
            EMAError: The parameters have different shapes, or the EMA already tracks the weights of
                another engine.
        """
        weights = _weights_of(source)
        self._check(weights[1])
        is_same = self._tracks(weights[1])
        if not self._master.bare:  # They are an engine's.
            if is_same:
                return
            raise EMAError(
                "the EMA tracks the weights of an engine, but these are other parameters",
                "pass the parameters of the model that prepare returned",
                "parameters",
            )
        former, state = self.shadow, self.shadow.state_dict()
        values = {self._index[part.name]: state[part.key] for part in self._master.addresses}
        self._track(weights, former.store)
        if former.steps or not is_same:
            self._load(values, former.steps)

    @property
    def optimization_step(self) -> int:
        """Number of optimizer steps that the EMA has counted."""
        return self.shadow.steps

    @property
    def shadow_params(self) -> list[torch.Tensor]:
        """Copies of the full fp32 EMA weights in parameter order; as large as the whole model."""
        values = dict(self._full("shadow_params"))
        return [values[index] for index in range(len(self._parameters))]

    def get_decay(self, optimization_step: int) -> float:
        """Return the decay of the update that follows an optimizer step.

        Args:
            optimization_step: Optimizer step, counting from 1.
        """
        schedule = _schedule(**self._settings())
        return schedule.at(optimization_step - self.update_after_step - 1)

    def at(self, step: int) -> float:
        """Return the decay of update ``step``, counting from 0, as ``DecaySchedule`` does."""
        return self.get_decay(step + 1)

    def step(self, parameters: Iterable[torch.nn.Parameter] | None = None) -> None:
        """Update the EMA after one applied optimizer step.

        Args:
            parameters: Parameters of the trained model. Required only if the EMA was created from a
                different object.
        """
        if parameters is not None and not self._tracks(given := _unique(parameters)):
            self.follow(given)
        self.shadow.step()
        self.cur_decay_value = self.get_decay(self.optimization_step)

    @torch.no_grad()
    def copy_to(self, parameters: Iterable[torch.nn.Parameter] | None = None) -> None:
        """Copy the EMA weights into parameters.

        Args:
            parameters: Target parameters of any dtype; by default those of the trained model.
        """
        given = self._parameters if parameters is None else _unique(parameters)
        if self._tracks(given):
            self._write(self.shadow.state_dict(), "copy_to()")
            return
        self._check(given)
        for index, value in self._full("copy_to()"):
            given[index].data.copy_(value)

    @torch.no_grad()
    def store(self, parameters: Iterable[torch.nn.Parameter] | None = None) -> None:
        """Save a copy of the trained weights for ``restore``; the copy needs 4 bytes per element.

        ``shadow.swapped_in()`` needs no copy.

        Args:
            parameters: Parameters of the trained model.

        Raises:
            EMAError: The parameters are not those that the EMA tracks.
        """
        self._check_tracked(parameters, "store()")
        read = self._master.read()
        self._stored = {each.address.key: each.value.to("cpu", copy=True) for each in read}

    @torch.no_grad()
    def restore(self, parameters: Iterable[torch.nn.Parameter] | None = None) -> None:
        """Restore the weights saved by ``store``.

        Args:
            parameters: Parameters of the trained model.

        Raises:
            EMAError: No weights are stored, or the parameters are not those that the EMA tracks.
        """
        self._check_tracked(parameters, "restore()")
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

    def state_dict(self) -> dict[str, Any]:
        """Return a state with the keys of diffusers' ``state_dict``, and fp32 ``shadow_params``."""
        return {**self._settings(), **self._steps(), "shadow_params": self.shadow_params}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state written by this class or by diffusers.

        Frozen parameters are not loaded.

        Args:
            state_dict: The state; all keys are optional.

        Raises:
            InvalidValueError: A setting has the wrong type or is out of range.
            EMAError: The number or the shapes of ``shadow_params`` are wrong; the EMA is unchanged.
        """
        state = {**self._settings(), **self._steps(), **state_dict}
        settings, values = {name: state[name] for name in _SETTINGS}, state.get("shadow_params")
        _schedule(**settings)
        whole(settings["update_after_step"], key="update_after_step", least=0)
        steps = whole(state["optimization_step"], key="optimization_step", least=0)
        if values is not None:
            self._check(values)
        vars(self).update(settings)
        self._load(dict(enumerate(values or ())), steps)

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
                "write EMAModel(..., model_cls=UNet2DModel, model_config=unet.config)",
                "save_pretrained()",
            )
        model = self.model_cls.from_config(self.model_config)
        model.register_to_config(**self._settings(), **self._steps())
        self.copy_to(model.parameters())
        writes = not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0
        together(
            self._master.group,
            "EMAModel.save_pretrained()",
            lambda: _save(model, Path(path)) if writes else None,
        )

    @classmethod
    def from_pretrained(cls, path: str | Path, model_cls: Any, foreach: bool = False) -> Self:
        """Load a folder written by ``save_pretrained`` of this class or of diffusers.

        Args:
            path: Path to the folder.
            model_cls: A diffusers model class.
            foreach: Ignored; accepted for compatibility with diffusers.
        """
        config, model = model_cls.load_config(path), model_cls.from_pretrained(path)
        ema = cls(model, foreach=foreach, model_cls=model_cls, model_config=model.config)
        ema.load_state_dict(
            {name: config[name] for name in (*_SETTINGS, "optimization_step") if name in config}
        )
        return ema

    @override
    def __repr__(self) -> str:
        return f"EMAModel(decay={self.decay})"

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SETTINGS}

    def _steps(self) -> dict[str, int]:
        return {"optimization_step": self.optimization_step}

    def _tracks(self, parameters: Sequence[torch.Tensor]) -> bool:
        return [*map(id, parameters)] == [*map(id, self._parameters)]

    def _check_tracked(self, parameters: Iterable[torch.nn.Parameter] | None, call: str) -> None:
        if parameters is not None and not self._tracks(_unique(parameters)):
            raise EMAError(
                "these are not the parameters that the EMA tracks",
                "pass the parameters of the trained model; if the EMA was created from a copy "
                "of that model, call ema.follow(model) first",
                call,
            )

    def _check(self, tensors: Sequence[Any]) -> None:
        """Check that ``tensors`` match the parameters in number and shapes."""
        fix = "pass the parameters of a model with the same architecture"
        if len(tensors) != (expected := len(self._parameters)):
            problem = f"there are {len(tensors)} parameters instead of {expected}"
            raise EMAError(problem, fix, "parameters")
        for index, (mine, theirs) in enumerate(zip(self._parameters, tensors, strict=True)):
            if full_shape(mine) != full_shape(theirs):
                problem = f"has shape {full_shape(theirs)} instead of {full_shape(mine)}"
                raise EMAError(problem, fix, f"parameters[{index}]")

    def _full(self, call: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield position and full EMA tensor of every parameter; of frozen ones, a copy."""
        self._wait_for_all(call)
        yield from ((self._index[name], value) for name, value in self.shadow.gather())
        for (name, index), parameter in zip(self._index.items(), self._parameters, strict=True):
            if parameter.requires_grad and name in self._master.parameters:
                continue
            if full_shape(parameter) != tuple(parameter.shape):
                raise EMAError(
                    "is frozen and partitioned, so it cannot be copied from the model",
                    "use ema.shadow.gather(), which yields only trainable parameters",
                    name,
                )
            yield index, parameter.detach().clone()

    def _load(self, values: Mapping[int, torch.Tensor], steps: int) -> None:
        """Set the step count, and the trained parameters among these full tensors by position."""
        current: Any = self.shadow.state_dict()
        state = ChainMap({"steps": torch.tensor(steps)}, current)
        for part in self._master.addresses:
            if (value := values.get(self._index[part.name])) is not None:
                state[part.key] = value.detach().reshape(-1)[part.start : part.stop]
        self.shadow.load_state_dict(state)

    def _write(self, values: Mapping[str, torch.Tensor], call: str) -> None:
        """Set the trained weights to these fragments."""
        self._wait_for_all(call)
        with self._master.editing() as fragments:
            for fragment in fragments:
                fragment.value.copy_(values[fragment.address.key])

    def _wait_for_all(self, call: str) -> None:
        """Wait for all ranks before anything moves; the error names ranks that did not call."""
        self._master.group.barrier(f"EMAModel.{call} (every rank must call it)")


def _schedule(
    *,
    decay: float,
    min_decay: float,
    use_ema_warmup: bool,
    inv_gamma: float,
    power: float,
    **_: Any,
) -> DecaySchedule:
    if use_ema_warmup:
        return WarmupDecay(decay=decay, inverse_gamma=inv_gamma, power=power, min_decay=min_decay)
    return RampDecay(decay=decay, min_decay=min_decay)


_Weights = tuple[Mapping[str, int], tuple[torch.nn.Parameter, ...], MasterWeights]
"""Position of each parameter by its name in the master weights; parameters; master weights."""


def _unique(parameters: Any) -> tuple[torch.nn.Parameter, ...]:
    is_module = isinstance(parameters, torch.nn.Module)
    return tuple(dict.fromkeys(parameters.parameters() if is_module else parameters))


def _weights_of(source: Any) -> _Weights:
    source = unwrapped(source)
    if is_deepspeed(source) or hasattr(source, "master_weights"):
        named = dict(source.module.named_parameters())
        positions = {name: position for position, name in enumerate(named)}
        return positions, tuple(named.values()), master_weights_of(source)
    holder = torch.nn.Module()
    for index, parameter in enumerate(_unique(source)):
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
    named = dict(holder.named_parameters())
    return {name: int(name) for name in named}, tuple(named.values()), master_weights_of(holder)


def _save(model: Any, path: Path) -> None:
    """Save a diffusers model; each file replaces an existing one only when it is complete."""
    with system_errors(EMAError, path, "the EMA weights cannot be written to this folder"):
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".ema-", dir=path) as draft:
            model.save_pretrained(draft)
            for file in Path(draft).iterdir():
                sync(file)
                file.replace(path / file.name)
        sync(path)
