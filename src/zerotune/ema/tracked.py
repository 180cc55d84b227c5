"""Parameters in the order diffusers knows them by, and the names their master weights have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import torch

from zerotune.backend.attaching import is_deepspeed, master_weights_of, unwrapped
from zerotune.backend.layouts import full_shape
from zerotune.backend.master_weights import MasterWeights
from zerotune.errors import EMAError


@attrs.frozen(kw_only=True, eq=False)
class TrackedParameters:
    """Parameters by position, with the view of their master weights."""

    parameters: tuple[torch.nn.Parameter, ...]
    """In the order of ``module.parameters()``."""
    names: tuple[str, ...]
    """What the master weights call them."""
    master: MasterWeights

    @classmethod
    def of(cls, source: Any) -> TrackedParameters:
        """Of an engine, of a module, or of the parameters themselves.

        Raises:
            EMAError: They are parameters of a half-precision or partitioned model: the master
                weights are the engine's.
            EngineError: There are no fp32 master weights.
        """
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
                    "are not the fp32 weights the optimizer updates",
                    key=f"parameters[{index}]",
                    value=(str(parameter.dtype), tuple(parameter.shape)),
                    fix="EMAModel(engine, ...) once accelerate or DeepSpeed has made the engine",
                )
            if id(parameter) not in names:
                names[id(parameter)] = str(index)
                holder.register_parameter(str(index), parameter)
        return cls(
            parameters=parameters,
            names=tuple(names[id(parameter)] for parameter in parameters),
            master=master_weights_of(holder),
        )

    def full_shape(self, index: int) -> tuple[int, ...]:
        """Shape of the parameter at a position, before partitioning."""
        return full_shape(self.parameters[index])

    def are(self, parameters: tuple[torch.nn.Parameter, ...]) -> bool:
        """Whether these are the same objects in the same order."""
        return len(parameters) == len(self.parameters) and all(
            mine is theirs for mine, theirs in zip(self.parameters, parameters, strict=True)
        )

    def like(self, parameters: tuple[torch.nn.Parameter, ...]) -> None:
        """Check that others have the same number and shapes.

        Raises:
            EMAError: The first that has not, by its position.
        """
        if len(parameters) != len(self.parameters):
            raise EMAError(
                f"there are {len(parameters)} parameters instead of {len(self.parameters)}",
                key="parameters",
                fix="give the parameters of the same architecture",
            )
        for index, (mine, theirs) in enumerate(zip(self.parameters, parameters, strict=True)):
            if full_shape(mine) != tuple(theirs.shape):
                raise EMAError(
                    f"has shape {tuple(theirs.shape)} instead of {full_shape(mine)}",
                    key=f"parameters[{index}]",
                    fix="give the parameters of the same architecture",
                )
