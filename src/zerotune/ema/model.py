"""``EMAModel``: the interface of diffusers' class of the same name, on top of ``EMAShadow``."""

from __future__ import annotations

import tempfile
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist

from zerotune._util.files import sync, system_errors
from zerotune._util.text import whole
from zerotune.backend.deepspeed.external import is_deepspeed, master_weights_of, unwrapped
from zerotune.backend.distributed import together
from zerotune.backend.master_weights import MasterWeights, full_shape
from zerotune.ema.decay import DecaySchedule, RampDecay, WarmupDecay
from zerotune.ema.shadow import DeviceStore, EMAShadow, HostStore, ShadowStore
from zerotune.errors import EMAError, InvalidValueError

if TYPE_CHECKING:
    from typing_extensions import Self


Parameters = Iterable[torch.nn.Parameter]

_SETTINGS = ("decay", "min_decay", "update_after_step", "use_ema_warmup", "inv_gamma", "power")


class EMAModel:
    """``diffusers.training_utils.EMAModel`` for all ZeRO stages, based on an ``EMAShadow``.

    In a script without DeepSpeed, only the import changes. With DeepSpeed, the fp32 weights belong
    to the engine, so the constructor receives the engine instead of the parameters::

        unet, optimizer, ... = accelerator.prepare(unet, optimizer, ...)
        ema_unet = EMAModel(unet, decay=0.9999, model_cls=..., model_config=...)
        ...
        ema_unet.step(unet.parameters())

    Names and semantics match those of diffusers, except for the differences listed on the EMA page
    of the documentation. The EMA is always fp32, starts on the CPU, and contains only trainable
    parameters; frozen parameters are copied from the model. Unlike in diffusers, a mismatch in the
    number or shapes of the parameters always raises an error. Under ZeRO, all methods except
    ``step`` and ``store`` are collective; if a rank omits a call, an error names that rank.

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
        temp_stored_params: Copies of the weights saved by ``store``; this rank's fragments by key
            if they are an engine's weights.

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
        self.decay, self.min_decay = decay, min_decay
        self.update_after_step, self.use_ema_warmup = update_after_step, use_ema_warmup
        self.inv_gamma, self.power, self.foreach = inv_gamma, power, foreach
        self.model_cls, self.model_config = model_cls, model_config
        self.cur_decay_value: float | None = None
        self.temp_stored_params: Sequence[torch.Tensor] | dict[str, torch.Tensor] | None = None
        self.get_decay(1)
        self._model = ModelParameters.of(parameters)
        self.shadow = EMAShadow(decay=_Schedule(self), store=store).attach(self._model.master)

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
        model, former = ModelParameters.of(source), self._model
        former.check(model.parameters)
        is_same = model.has(former.parameters)
        if former.is_engine:
            if not is_same:
                raise EMAError(
                    "the EMA tracks the weights of an engine, but these are other parameters",
                    key="parameters",
                    fix="pass the parameters of the model that prepare returned",
                )
            return
        values, steps, store = dict(self._trained("follow()")), self.shadow.steps, self.shadow.store
        self._model = model
        self.shadow = EMAShadow(decay=_Schedule(self), store=store).attach(model.master)
        if steps or not is_same:
            self._load(values, steps)

    @property
    def optimization_step(self) -> int:
        """Number of optimizer steps that the EMA has counted; can be set."""
        return self.shadow.steps

    @optimization_step.setter
    def optimization_step(self, steps: int) -> None:
        self.load_state_dict({"optimization_step": steps})

    @property
    def shadow_params(self) -> list[torch.Tensor]:
        """Full fp32 EMA weights in parameter order; can be set to tensors of the same shapes.

        If the EMA was created from parameters, these are the EMA's own tensors, which later updates
        modify, as in diffusers. If it was created from an engine or is in a file, these are CPU
        copies, which need as much memory as the whole model.
        """
        values = {**dict(self._trained("shadow_params")), **dict(self._frozen())}
        return [values[index] for index in range(len(self._model.parameters))]

    @shadow_params.setter
    def shadow_params(self, values: Sequence[torch.Tensor]) -> None:
        self.load_state_dict({"shadow_params": values})

    def get_decay(self, optimization_step: int) -> float:
        """Return the decay of the update that follows an optimizer step.

        Args:
            optimization_step: Optimizer step, counting from 1.
        """
        schedule = _schedule(**self._settings())
        return schedule.at(optimization_step - self.update_after_step - 1)

    def step(self, parameters: Parameters | None = None) -> None:
        """Update the EMA after one applied optimizer step.

        Args:
            parameters: Parameters of the trained model. Required only if the EMA was created from a
                different object.
        """
        if not self._model.has(given := self._given(parameters)):
            self.follow(given)
        self.shadow.step()
        self.cur_decay_value = self.get_decay(self.optimization_step)

    @torch.no_grad()
    def copy_to(self, parameters: Parameters | None = None) -> None:
        """Copy the EMA weights into parameters.

        Args:
            parameters: Target parameters of any dtype; by default those of the trained model.
        """
        given = self._given(parameters)
        if self._model.is_engine and self._model.has(given):
            self._write(self.shadow.state_dict(), "copy_to()")
            return
        self._model.check(given)
        for values in (self._trained("copy_to()"), self._frozen()):
            for index, value in values:
                given[index].data.copy_(value)

    @torch.no_grad()
    def store(self, parameters: Parameters | None = None) -> None:
        """Save a copy of the weights for ``restore``; the copy needs 4 bytes per element.

        ``shadow.swapped_in()`` needs no copy.

        Args:
            parameters: Parameters to save; by default those of the trained model.
        """
        given = self._given(parameters)
        if self._model.is_engine and self._model.has(given):
            read = self._model.master.read()
            stored = {f.address.key: f.value.to("cpu", copy=True) for f in read}
            self.temp_stored_params = stored
        else:
            self.temp_stored_params = [p.detach().to("cpu", copy=True) for p in given]

    @torch.no_grad()
    def restore(self, parameters: Parameters | None = None) -> None:
        """Restore the weights saved by ``store``.

        Args:
            parameters: The parameters that were passed to ``store``.

        Raises:
            EMAError: No weights are stored, or the stored weights belong to different parameters.
        """
        given, stored = self._given(parameters), self.temp_stored_params
        if stored is None:
            raise EMAError(
                "nothing is stored", key="restore()", fix="call store() before copy_to()"
            )
        is_engine = self._model.is_engine and self._model.has(given)
        if isinstance(stored, dict) and is_engine:
            self._write(stored, "restore()")
        elif isinstance(stored, dict) or is_engine or len(stored) != len(given):
            raise EMAError(
                "the stored weights belong to different parameters",
                key="restore()",
                fix="pass the same parameters to store() and restore()",
            )
        else:
            for parameter, value in zip(given, stored, strict=True):
                parameter.data.copy_(value)
        self.temp_stored_params = None

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
                key="dtype",
                value=str(dtype),
                fix="omit dtype; copy_to() rounds the EMA weights to the model's dtype",
            )
        if device is not None and torch.device(device) != self.shadow.device:
            host = torch.device(device).type == "cpu"
            self.shadow.move(HostStore() if host else DeviceStore(device=torch.device(device)))

    def pin_memory(self) -> None:
        """Do nothing, because updates never copy the EMA to a device."""

    def state_dict(self) -> dict[str, Any]:
        """Return a state with the keys of diffusers' ``state_dict``, and fp32 ``shadow_params``."""
        return {
            **self._settings(),
            "optimization_step": self.optimization_step,
            "shadow_params": self.shadow_params,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state written by this class or by diffusers.

        Frozen parameters are not loaded.

        Args:
            state_dict: The state; all keys are optional.

        Raises:
            InvalidValueError: A setting has the wrong type or is out of range.
            EMAError: The number or the shapes of ``shadow_params`` are wrong; the EMA is unchanged.
        """
        state = ChainMap(dict(state_dict), self._settings())
        settings = {name: state[name] for name in _SETTINGS}
        _schedule(**settings)
        whole(settings["update_after_step"], key="update_after_step", least=0)
        steps = state.get("optimization_step", self.optimization_step)
        steps = whole(steps, key="optimization_step", least=0)
        values = state.get("shadow_params")
        if values is not None:
            self._model.check(values)
        vars(self).update(settings)
        self._load({} if values is None else dict(enumerate(values)), steps)

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
        model.register_to_config(**self._settings(), optimization_step=self.optimization_step)
        self.copy_to(model.parameters())
        writes = not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0
        together(
            self._model.master.group,
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
        ema = cls(
            model.parameters(), foreach=foreach, model_cls=model_cls, model_config=model.config
        )
        ema.load_state_dict(
            {name: config[name] for name in (*_SETTINGS, "optimization_step") if name in config}
        )
        return ema

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SETTINGS}

    def _given(self, parameters: Parameters | None) -> tuple[torch.nn.Parameter, ...]:
        if parameters is None:
            return self._model.parameters
        if isinstance(parameters, torch.nn.Module):
            return tuple(parameters.parameters())
        return tuple(parameters)

    def _trained(self, call: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the position and the full EMA tensor of every trained parameter."""
        model, state = self._model, self.shadow.state_dict()
        full: Iterable[tuple[str, torch.Tensor]] = (
            (part.name, state[part.key].view(part.shape)) for part in model.master.addresses
        )
        if model.is_engine:
            self._wait_for_all(call)
            full = self.shadow.gather()
        positions: dict[str, list[int]] = {}
        for index, name in enumerate(model.names):
            positions.setdefault(name, []).append(index)
        for name, value in full:
            for index in positions[name]:
                yield index, value

    def _frozen(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the position and a copy of every parameter that is not trained."""
        trained = self._model.master.parameters
        for index, parameter in enumerate(self._model.parameters):
            if parameter.requires_grad and self._model.names[index] in trained:
                continue
            if full_shape(parameter) != tuple(parameter.shape):
                raise EMAError(
                    "is frozen and partitioned, so it cannot be copied from the model",
                    key=self._model.names[index],
                    fix="use ema.shadow.gather(), which yields only trainable parameters",
                )
            yield index, parameter.detach().clone()

    def _load(self, values: Mapping[int, torch.Tensor], steps: int) -> None:
        """Set the step count, and the trained parameters among these full tensors by position."""
        current: Any = self.shadow.state_dict()
        state = ChainMap({"steps": torch.tensor(steps)}, current)
        by_name = {self._model.names[index]: value for index, value in values.items()}
        for part in self._model.master.addresses:
            if part.name in by_name:
                flat = by_name[part.name].detach().reshape(-1)
                state[part.key] = flat[part.start : part.start + part.numel]
        self.shadow.load_state_dict(state)

    def _write(self, values: Mapping[str, torch.Tensor], call: str) -> None:
        """Set the engine's weights to these fragments."""
        self._wait_for_all(call)
        with self._model.master.editing() as fragments:
            for fragment in fragments:
                fragment.value.copy_(values[fragment.address.key])

    def _wait_for_all(self, call: str) -> None:
        """Wait for all ranks before anything moves; the error names ranks that did not call."""
        self._model.master.group.barrier(f"EMAModel.{call} (every rank must call it)")


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


class _Schedule:
    """The current schedule of an ``EMAModel``, whose attributes scripts may change at any time."""

    def __init__(self, owner: EMAModel) -> None:
        self._owner = owner

    def at(self, step: int) -> float:
        return self._owner.get_decay(step + 1)

    def __repr__(self) -> str:
        return f"EMAModel(decay={self._owner.decay})"


@attrs.frozen(kw_only=True, eq=False)
class ModelParameters:
    """The parameters of an ``EMAModel`` in diffusers' order, and their master weights."""

    parameters: tuple[torch.nn.Parameter, ...]
    names: tuple[str, ...]
    """Names of the parameters in the master weights."""
    master: MasterWeights
    is_engine: bool
    """Whether an engine owns the master weights; otherwise, they are the parameters themselves."""

    @classmethod
    def of(cls, source: Any) -> ModelParameters:
        """Return the parameters of an engine, a module or an iterable of parameters.

        Args:
            source: As in the constructor of ``EMAModel``.

        Raises:
            EMAError: The parameters are not the fp32 weights.
        """
        source = unwrapped(source)
        if isinstance(source, torch.nn.Module) and not is_deepspeed(source):
            source = source.parameters()
        # A DeepSpeedEngine may be iterable too, if its module is.
        is_engine = isinstance(source, torch.nn.Module) or not isinstance(source, Iterable)
        named = dict(source.module.named_parameters()) if is_engine else {}
        parameters = tuple(named.values() if is_engine else source)
        if is_engine:
            master, names = master_weights_of(source), tuple(named)
        else:
            master, names = _masters_of(parameters)
        return cls(parameters=parameters, names=names, master=master, is_engine=is_engine)

    def has(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether ``parameters`` are the same objects, in the same order."""
        return [*map(id, parameters)] == [*map(id, self.parameters)]

    def check(self, tensors: Sequence[Any]) -> None:
        """Check that ``tensors`` match the parameters in number and shapes."""
        if len(tensors) != len(self.parameters):
            raise EMAError(
                f"there are {len(tensors)} parameters instead of {len(self.parameters)}",
                key="parameters",
                fix="pass the parameters of a model with the same architecture",
            )
        for index, (mine, theirs) in enumerate(zip(self.parameters, tensors, strict=True)):
            if full_shape(mine) != full_shape(theirs):
                raise EMAError(
                    f"has shape {full_shape(theirs)} instead of {full_shape(mine)}",
                    key=f"parameters[{index}]",
                    fix="pass the parameters of a model with the same architecture",
                )


def _masters_of(
    parameters: Sequence[torch.nn.Parameter],
) -> tuple[MasterWeights, tuple[str, ...]]:
    """Return parameters as master weights, and the name of each; a tied parameter has one name."""
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
        holder.register_parameter(names.setdefault(id(parameter), str(index)), parameter)
    return master_weights_of(holder), tuple(names[id(parameter)] for parameter in parameters)


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
