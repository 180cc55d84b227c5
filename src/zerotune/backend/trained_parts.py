"""Several models that one engine trains, such as a U-Net and its text encoders.

DeepSpeed trains one module. A container around the models makes them one, and its ``forward``
hands each call to the part it names: so every call goes through the engine, which at stage 3
gathers the weights.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from zerotune.errors import InvalidValueError

if TYPE_CHECKING:
    import torch

    from zerotune.backend.engine import Engine


class TrainedParts(torch.nn.Module):
    """Models under the names a pipeline gives them; the first is the one called by default.

    ::

        parts = TrainedParts(unet=unet, text_encoder=encoder)
        with zerotune.prepare(model=parts, plan=plan) as engine:
            states = engine(input_ids=ids, part="text_encoder").last_hidden_state
            noise = engine(noisy, timesteps, encoder_hidden_states=states).sample

    All parts share one plan, optimizer, EMA and checkpoint; parameters are called
    ``<part>.<name>``. Patterns of optimizer groups (``text_encoder.*``) give a part a learning
    rate of its own.

    Args:
        parts: The models by name; names are those of the pipeline's components.

    Raises:
        InvalidValueError: No part, a name that cannot be one, or a module given twice.
    """

    def __init__(self, **parts: torch.nn.Module) -> None:
        super().__init__()
        if not parts:
            raise InvalidValueError("needs at least one model", key="parts", value=())
        for name, part in parts.items():
            if hasattr(self, name) or keyword.iskeyword(name) or name == "part":
                raise InvalidValueError(
                    "is taken", key="parts", value=name, fix="use the pipeline's component names"
                )
            if any(part is other for other in self.children()):
                raise InvalidValueError("is the same module as another part", key=name)
            self.add_module(name, part)
        self._primary = next(iter(parts))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parts, the one called by default first."""
        return tuple(self._modules)

    @property
    def primary(self) -> torch.nn.Module:
        """The part that is called when none is named."""
        return self[self._primary]

    @property
    def config(self) -> Any:
        """The primary part's configuration, so that samplers find its input's shape."""
        return getattr(self.primary, "config", None)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the primary part's weights."""
        return next(p.dtype for p in self.primary.parameters())

    @property
    def device(self) -> torch.device:
        """Where the primary part's weights are."""
        return next(p.device for p in self.primary.parameters())

    def forward(self, *args: Any, part: str | None = None, **kwargs: Any) -> Any:
        """Call a part.

        Args:
            args: Its positional arguments.
            part: Its name; the first part when not given.
            kwargs: Its keyword arguments.

        Raises:
            InvalidValueError: There is no such part.
        """
        return self[self._primary if part is None else part](*args, **kwargs)

    def enable_gradient_checkpointing(self) -> None:
        """Recompute activations in the backward pass of every part that can."""
        for _, module in self.items():
            part: Any = module
            if hasattr(part, "enable_gradient_checkpointing"):
                part.enable_gradient_checkpointing()
                continue
            # The second is what transformers 4 calls the first.
            for method in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
                if hasattr(part, method):
                    # The reentrant kind gives adapters no gradient: no input requires one.
                    getattr(part, method)({"use_reentrant": False})
                    break

    def items(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Names and models."""
        return ((name, self[name]) for name in self.names)

    def __getitem__(self, name: str) -> torch.nn.Module:
        """A part.

        Raises:
            InvalidValueError: There is no such part.
        """
        part = self._modules.get(name)
        if part is None:
            raise InvalidValueError(
                f"there is no such part, only {', '.join(self.names)}", key="part", value=name
            )
        return part


def primary_of(model: Any) -> Any:
    """The module that is called by default: of an engine, of ``TrainedParts``, or the model."""
    module = getattr(model, "module", model)
    return module.primary if isinstance(module, TrainedParts) else module


def components(
    model: torch.nn.Module, name: str | None = None
) -> Mapping[str, tuple[str, torch.nn.Module]]:
    """The models an engine trains, by the names a diffusers pipeline gives them.

    Args:
        model: A model, or ``TrainedParts``.
        name: What a single model is called in the pipeline; told from its class when not given.

    Returns:
        For each component the prefix of its parameters' names in ``model``, and the module.
    """
    if isinstance(model, TrainedParts):
        if name is not None and name not in model.names:
            raise InvalidValueError(
                f"the parts are {', '.join(model.names)}", key="component", value=name
            )
        return {n: (f"{n}.", part) for n, part in model.items() if name in (None, n)}
    kind = type(model).__name__
    if name is None:
        name = (
            "unet" if kind.startswith("UNet") else "transformer" if "Transformer" in kind else None
        )
    if name is None:
        raise InvalidValueError(
            "the class does not tell what a pipeline calls this model",
            key="component",
            value=kind,
            fix='name it: component="text_encoder" (or "text_encoder_2", "transformer", ...)',
        )
    return {name: ("", model)}


# -- A model that another one is trained through, for a while.


@contextmanager
def frozen(engine: Engine) -> Iterator[torch.nn.Module]:
    """The model of an engine, through which gradients pass while none stay in it.

    For a loss of one engine that runs through the model of another, such as a generator's
    through its critic; forward and backward belong into the block::

        with frozen(critic) as judge:
            loss = -judge(made).mean()
            generator.backward(loss)
        generator.step()

    Not through the engine itself: DeepSpeed takes every backward pass through an engine's output
    for one of that engine's own.

    Args:
        engine: The engine whose weights get no gradient inside the block.
    """
    trained = [each for each in engine.module.parameters() if each.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield engine.module
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
