"""Stage 0: every rank has all weights in fp32, or in bf16 or fp16 with a flat fp32 copy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from typing_extensions import override

from zerotune.backend.deepspeed.wrapper import OptimizerWrapper, Upstream
from zerotune.backend.fragments import FragmentAddress
from zerotune.backend.master_weights import MasterLayout, ParameterLayout, ResidentLayout, whole
from zerotune.decisions import Decision


class Fp32Wrapper(OptimizerWrapper):
    """Adapter for fp32 at stage 0, which has no wrapper; the parameters are the master weights."""

    skips_overflow = False

    @property
    @override
    def inner(self) -> Any:
        return self.raw

    @override
    def _find_layout(self) -> MasterLayout:
        return ParameterLayout(module=self.engine.module, optimizer=self.raw)

    @property
    @override
    def members(self) -> Sequence[Sequence[torch.Tensor]]:
        return [group["params"] for group in self.raw.param_groups]

    @property
    @override
    def leaves_frozen(self) -> bool:
        # It keeps one counter for all weights in the state of the last one with a gradient.
        return type(self.raw).__name__ != "FusedAdam"

    @override
    def drop_gradients(self) -> None:
        self.raw.zero_grad()


class HalfWrapper(OptimizerWrapper):
    """Adapter for ``FP16_Optimizer`` and ``FP16_UnfusedOptimizer``: stage 0 in bf16 or fp16."""

    upstream = (
        Upstream(
            owner="deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer",
            relied_on=("step", "refresh_fp32_params"),
        ),
        Upstream(
            owner="deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer",
            relied_on=("step", "refresh_fp32_params"),
        ),
    )
    scaler_name = "loss_scale_config"

    @property
    def _flats(self) -> Sequence[torch.Tensor]:
        """One flat copy per group; empty for the unfused wrapper."""
        flats: Sequence[torch.Tensor] = getattr(self.raw, "fp32_groups_flat", ())
        return flats

    @override
    def _find_layout(self) -> MasterLayout:
        return HalfPrecisionLayout(module=self.engine.module, wrapper=self.raw, flats=self._flats)

    @property
    @override
    def members(self) -> Sequence[Sequence[torch.Tensor]]:
        groups: Sequence[Sequence[torch.Tensor]] = self.raw.fp16_groups
        return groups

    @override
    def drop_gradients(self) -> None:
        self.raw.zero_grad()
        for flat in self._flats:
            flat.grad = None

    @override
    def correct(self) -> tuple[Decision, ...]:
        """Undo the optimizer step that DeepSpeed's wrappers run when they are created.

        ``FP16_Optimizer`` allocates its states by running a step on zero gradients. This extra step
        applies weight decay and sets Adam's counter to 1. The first real step would therefore use
        the second step's bias correction, and losses would differ from stages 1-3 by up to 5e-2.
        """
        if self.engine.global_steps:
            return ()
        self.raw.refresh_fp32_params()
        for flat, parameters in zip(self._flats, self.raw.fp16_groups, strict=False):
            offset = 0
            for parameter in parameters:
                target = flat.detach().narrow(0, offset, parameter.numel())
                target.copy_(parameter.detach().view(-1))
                offset += parameter.numel()
        self.raw.optimizer.state.clear()
        return (
            Decision(
                "optimizer.step",
                1,
                0,
                "at stage 0 in half precision, DeepSpeed runs a step on zero gradients to "
                "allocate its states; zerotune has undone this step, so training starts at step 0",
            ),
        )


class HalfPrecisionLayout(ResidentLayout):
    """Layout with one flat fp32 copy per parameter group, or one copy per parameter."""

    replicated = True

    def __init__(
        self, *, module: torch.nn.Module, wrapper: Any, flats: Sequence[torch.Tensor]
    ) -> None:
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        slabs, addresses, self._pairs = list(flats), [], []
        for index, group in enumerate(wrapper.fp16_groups):
            offset = 0
            for position, parameter in enumerate(group):
                if not flats:
                    slabs.append(wrapper.fp32_groups[index][position])
                slab = index if flats else len(slabs) - 1
                addresses.append(whole(names[id(parameter)], parameter, slab=slab, offset=offset))
                self._pairs.append((parameter, addresses[-1]))
                offset += parameter.numel() if flats else 0
        self._model = {address.name: parameter for parameter, address in self._pairs}
        super().__init__(
            optimizer=wrapper.optimizer,
            slabs=slabs,
            addresses=tuple(addresses),
            order=tuple((address.name, address.shape) for address in addresses),
        )

    @property
    @override
    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self._model.items()

    @override
    def in_model(self, address: FragmentAddress) -> torch.Tensor | None:
        weights: torch.Tensor = self._model[address.name].data
        return weights.reshape(-1)

    @override
    def refresh(self) -> None:
        for parameter, address in self._pairs:
            flat = self._slabs[address.slab].detach().view(-1)
            master = flat.narrow(0, address.offset, address.numel)
            parameter.data.copy_(master.view_as(parameter))
