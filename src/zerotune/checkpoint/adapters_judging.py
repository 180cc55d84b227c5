"""Have adapters learned anything? A LoRA file that does nothing looks like one that works."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import attrs
import torch

from zerotune.backend.adapters import AdapterParameter, fingerprint, recall
from zerotune.decisions import Decision
from zerotune.errors import CheckpointCorruptError

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine

_SHOWN: Final = 4


@attrs.frozen(kw_only=True)
class _Layer:
    """An adapted layer of a component."""

    component: str
    name: str


class Judgement:
    """Looks at each tensor that is exported, and at the end says whether the whole is sound.

    A layer has learned nothing when none of its tensors differs from what it was before training,
    or when the factor that begins at zero is still zero. That may be right for a layer outside
    the loss, such as the last of CLIP, so it is only told; of a whole component it is an error.

    Args:
        initial: For each trained parameter the fingerprints of its first values, if known.
        layers: For each trained parameter the layer it adapts.
        steps: Optimizer steps that were applied.
    """

    def __init__(
        self, *, initial: Mapping[str, frozenset[str]], layers: Mapping[str, _Layer], steps: int
    ) -> None:
        self._initial = initial
        self._layers = layers
        self._steps = steps
        self._moved: dict[_Layer, bool] = {}
        self._zero: set[_Layer] = set()

    @classmethod
    def of(
        cls, engine: Engine, adapters: Mapping[str, tuple[str, torch.nn.Module, str]]
    ) -> Judgement:
        """For the adapters of an engine, by component."""
        initial: dict[str, frozenset[str]] = {}
        layers = {}
        for component, (prefix, module, adapter) in adapters.items():
            facts = recall(module, adapter)
            if facts is not None:
                initial |= {f"{prefix}{name}": prints for name, prints in facts.initial.items()}
            for name, _ in module.named_parameters():
                parsed = AdapterParameter.parse(name)
                if parsed is not None and parsed.adapter == adapter:
                    layers[f"{prefix}{name}"] = _Layer(component=component, name=parsed.layer)
        state = engine.state
        return cls(initial=initial, layers=layers, steps=state.global_step - state.skipped_steps)

    def see(self, name: str, tensor: torch.Tensor, written: torch.Tensor) -> None:
        """Look at a parameter.

        Args:
            name: Its name in the engine.
            tensor: In fp32.
            written: As it goes into the file.

        Raises:
            CheckpointCorruptError: It is empty, or not finite.
        """
        if not written.numel():
            raise CheckpointCorruptError("is empty", key=name, value=tuple(written.shape))
        if not bool(torch.isfinite(written).all()):
            raise CheckpointCorruptError(
                f"is not finite in {written.dtype}",
                key=name,
                fix="look at the losses; in fp16, export in fp32 or bf16",
            )
        layer = self._layers[name]
        parsed = AdapterParameter.parse(name)
        if parsed is not None and parsed.starts_at_zero and not bool(written.any()):
            self._zero.add(layer)
        moved = fingerprint(tensor) not in self._initial.get(name, frozenset())
        self._moved[layer] = self._moved.get(layer, False) or moved

    def conclude(self) -> tuple[Decision, ...]:
        """What is remarkable.

        Raises:
            CheckpointCorruptError: All adapters of a component have learned nothing, after
                steps that should have taught them.
        """
        still = [layer for layer, moved in self._moved.items() if not moved or layer in self._zero]
        if not still:
            return ()
        if self._steps == 0:
            return (self._decision(still, "no optimizer step was taken: the file does nothing"),)
        for component in {layer.component for layer in still}:
            every = [layer for layer in self._moved if layer.component == component]
            idle = [layer for layer in still if layer.component == component]
            if len(idle) == len(every):
                raise CheckpointCorruptError(
                    f"none of the {len(every)} adapters has learned anything in {self._steps} "
                    f"steps ({self._why(idle)})",
                    key=component,
                    fix="look at the learning rate, and whether the loss depends on the adapters",
                )
        return (self._decision(still, "have learned nothing: outside the loss, perhaps"),)

    def _why(self, layers: list[_Layer]) -> str:
        zero = all(layer in self._zero for layer in layers)
        return "every lora_B is zero" if zero else "all are as they were initialized"

    def _decision(self, still: list[_Layer], reason: str) -> Decision:
        names = [f"{layer.component}.{layer.name}" for layer in still]
        shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
        return Decision(
            key="adapters",
            before=len(self._moved),
            after=len(self._moved) - len(still),
            reason=f"{len(still)} of {len(self._moved)} layers {reason} ({shown})"
            if self._steps
            else reason,
            severity="warning",
        )
