"""Several models that one engine trains, such as a U-Net and its text encoders.

DeepSpeed trains a single module, so a container module holds all models. The container's
``forward`` passes each call to one of the models. Every call therefore goes through the engine,
which at stage 3 gathers the weights.
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
    """A module that contains several named models; by default, a call runs the first one.

    ::

        parts = TrainedParts(unet=unet, text_encoder=encoder)
        with zerotune.prepare(model=parts, plan=plan) as engine:
            states = engine(input_ids=ids, part="text_encoder").last_hidden_state
            noise = engine(noisy, timesteps, encoder_hidden_states=states).sample

    The models, called parts, share one plan, optimizer, EMA and checkpoint. Parameters are named
    ``<part>.<name>``. To set a part's learning rate, add an optimizer group with a pattern such as
    ``text_encoder.*``.

    Args:
        parts: The models, by their component names in the pipeline.

    Raises:
        InvalidValueError: There is no part, a name is invalid, or a module is passed twice.
    """

    def __init__(self, **parts: torch.nn.Module) -> None:
        super().__init__()
        if not parts:
            raise InvalidValueError("needs at least one model", key="parts", value=())
        for name, part in parts.items():
            if hasattr(self, name) or keyword.iskeyword(name) or name == "part":
                raise InvalidValueError(
                    "is not a valid part name", "use the pipeline's component names", "parts", name
                )
            if any(part is other for other in self.children()):
                raise InvalidValueError(
                    "this module is passed twice, under different names",
                    "pass each module once",
                    name,
                )
            self.add_module(name, part)
        self._primary = next(iter(parts))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parts, with the default part first."""
        return tuple(self._modules)

    @property
    def primary(self) -> torch.nn.Module:
        """The default part, which a call without ``part=`` uses."""
        return self[self._primary]

    @property
    def config(self) -> Any:
        """Configuration of the default part, from which samplers read the input's shape."""
        return getattr(self.primary, "config", None)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the default part's weights."""
        return next(p.dtype for p in self.primary.parameters())

    @property
    def device(self) -> torch.device:
        """Device of the default part's weights."""
        return next(p.device for p in self.primary.parameters())

    def forward(self, *args: Any, part: str | None = None, **kwargs: Any) -> Any:
        """Call one of the parts.

        Args:
            args: Positional arguments for the part.
            part: Name of the part; default: the first part.
            kwargs: Keyword arguments for the part.

        Raises:
            InvalidValueError: No part has this name.
        """
        return self[self._primary if part is None else part](*args, **kwargs)

    def enable_gradient_checkpointing(self) -> None:
        """Enable gradient checkpointing in every part that supports it."""
        for _, module in self.items():
            part: Any = module
            if hasattr(part, "enable_gradient_checkpointing"):
                part.enable_gradient_checkpointing()
                continue
            # transformers 5 has the first method, transformers 4 the second.
            for method in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
                if hasattr(part, method):
                    # Reentrant checkpointing gives adapters no gradient, because no input requires
                    # one.
                    getattr(part, method)({"use_reentrant": False})
                    break

    def items(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Return an iterator over names and models."""
        return ((name, self[name]) for name in self.names)

    def __getitem__(self, name: str) -> torch.nn.Module:
        """Return the part with a name.

        Raises:
            InvalidValueError: No part has this name.
        """
        part = self._modules.get(name)
        if part is None:
            raise InvalidValueError(
                "no part has this name", f"use one of {', '.join(self.names)}", "part", name
            )
        return part


def primary_of(model: Any) -> Any:
    """Return the default part of a ``TrainedParts``; for any other model, the model itself.

    Args:
        model: A model, or an engine.
    """
    module = getattr(model, "module", model)
    return module.primary if isinstance(module, TrainedParts) else module


def components(
    model: torch.nn.Module, name: str | None = None
) -> Mapping[str, tuple[str, torch.nn.Module]]:
    """Return the trained models, keyed by their component names in a diffusers pipeline.

    Args:
        model: A model, or ``TrainedParts``.
        name: Name of a single model in the pipeline; default: derived from the model's class.

    Returns:
        For each component name, the prefix of its parameter names in ``model``, and its module.
    """
    if isinstance(model, TrainedParts):
        if name is not None and name not in model.names:
            raise InvalidValueError(
                "no part has this name", f"use one of {', '.join(model.names)}", "component", name
            )
        return {n: (f"{n}.", part) for n, part in model.items() if name in (None, n)}
    kind = type(model).__name__
    if name is None:
        name = (
            "unet" if kind.startswith("UNet") else "transformer" if "Transformer" in kind else None
        )
    if name is None:
        raise InvalidValueError(
            "the model's name in a pipeline cannot be derived from its class",
            'pass component="text_encoder" (or "text_encoder_2", "transformer", ...)',
            "component",
            kind,
        )
    return {name: ("", model)}


# -- Training through the model of a different engine.


@contextmanager
def frozen(engine: Engine) -> Iterator[torch.nn.Module]:
    """Inside the block, gradients flow through an engine's model, but not into its weights.

    Use ``frozen`` if one engine's loss depends on another engine's model. For example, a
    generator's loss may depend on a critic. Run both the forward and the backward pass inside the
    block::

        with frozen(critic) as judge:
            loss = -judge(made).mean()
            generator.backward(loss)
        generator.step()

    Call the yielded model, not its engine: DeepSpeed counts every backward pass through an engine's
    output as a backward pass of that engine.

    Args:
        engine: The engine whose weights get no gradients inside the block.

    Yields:
        The engine's model.
    """
    trained = [each for each in engine.module.parameters() if each.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield engine.module
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
