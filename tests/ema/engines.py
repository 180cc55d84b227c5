"""Rank functions of the EMA tests on real engines."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from tests.support.models import HostileNet, WideNet
from tests.support.runs import Case, start
from zerotune.ema import EMAShadow, RampDecay

STEPS = 6


def model_for(case: Case) -> HostileNet:
    return WideNet() if case.offload == "nvme" else HostileNet(scalar=not case.deepspeed)


def batch(engine: Any, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + engine.group.rank)
    return torch.randn(4, 7, 7, generator=generator).to(engine.device, engine.dtype)


def train(engine: Any, step: int) -> None:
    loss = (engine(batch(engine, step)).float() - 0.5).pow(2).mean()
    engine.backward(loss)
    assert engine.step().applied


class Reference:
    """An EMA of gathered weights in float64."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._average = {name: full.double() for name, full in engine.master_weights.gather()}

    def step(self, decay: float) -> None:
        for name, full in self._engine.master_weights.gather():
            self._average[name].mul_(decay).add_(full.double(), alpha=1 - decay)

    def error(self, ema: EMAShadow) -> float:
        """Return the largest relative L2 distance of a parameter's EMA from this reference."""
        worst = 0.0
        for name, full in ema.gather():
            expected = self._average[name]
            assert full.dtype == torch.float32
            assert full.shape == expected.shape
            worst = max(worst, float((full.double() - expected).norm() / expected.norm()))
        return worst


def follow(case: Case) -> dict[str, Any]:
    """Train with two shadows; compare with float64; swap one in and out again."""
    engine = start(case, model_for(case))
    fast = EMAShadow(decay=RampDecay(decay=0.99)).attach(engine)
    slow = EMAShadow(decay=0.8, update_every=2, start_after=1).attach(engine.master_weights)
    references = Reference(engine), Reference(engine)
    for step in range(1, STEPS + 1):
        train(engine, step)
        fast.step()
        slow.step()
        references[0].step(fast.decay)
        if step % 2 == 0:
            references[1].step(0.0 if step == 2 else 0.8**2)
    result = {
        "fast": references[0].error(fast),
        "slow": references[1].error(slow),
        "distance": fast.distance(),
        "nbytes": fast.nbytes,
        "numel": sum(full.numel() for _, full in engine.master_weights.gather()),
        "replicated": engine.master_weights.replicated,
        "whole": {name for name, p in engine.module.named_parameters() if p.numel()},
        "swapped": swapped_groups(engine),
        **swap(engine, fast, case),
    }
    result["exception"] = survives_an_exception(engine, fast)
    train(engine, STEPS + 1)
    fast.step()
    engine.close()
    return result


def swap(engine: Any, ema: EMAShadow, case: Case) -> dict[str, bool]:
    """Check states before, inside and after ``swapped_in``."""
    x = batch(engine, step=99)
    # At stage 3 a forward pass in evaluation mode may leave whole copies of the weights behind.
    forward(engine, x)
    averaged = dict(ema.gather())
    trained = dict(engine.master_weights.gather())
    before, output = state(engine, ema), forward(engine, x)
    with ema.swapped_in():
        inside = dict(engine.master_weights.gather())
        seen = forward(engine, x)
        still = all(torch.equal(full, averaged[name]) for name, full in ema.gather())
    return {
        "runs_on_the_average": torch.equal(seen, expected_output(case, engine, averaged, x)),
        "average_in_the_engine": all(torch.equal(inside[n], averaged[n]) for n in averaged),
        "average_is_another": not all(torch.equal(trained[n], averaged[n]) for n in averaged),
        "gather_is_the_average": still,
        "output_differs": not torch.equal(seen, output),
        "restored": state(engine, ema) == before,
        "output_restored": torch.equal(forward(engine, x), output),
    }


def survives_an_exception(engine: Any, ema: EMAShadow) -> bool:
    before = state(engine, ema)
    try:
        with ema.swapped_in():
            raise RuntimeError("validation failed")
    except RuntimeError:
        return state(engine, ema) == before
    return False


def forward(engine: Any, x: torch.Tensor) -> torch.Tensor:
    with engine.evaluating():
        return engine(x).float().cpu()


def expected_output(
    case: Case, engine: Any, weights: dict[str, torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """Return the output of a plain model with these weights."""
    model = model_for(case)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])
        if case.deepspeed:
            return model.to(engine.device, engine.dtype)(x).float().cpu()
        with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16"):
            return model(x).float()


def state(engine: Any, ema: EMAShadow) -> dict[str, str]:
    """Fingerprint this rank's master weights, low-precision weights, optimizer states and shadow.

    Whole copies that stage 3 gathers come and go, so only partitions are read.
    """
    found = {f"ema {key}": fingerprint(value) for key, value in ema.state_dict().items()}
    for fragment in engine.master_weights.read():
        found[f"master {fragment.address.key}"] = fingerprint(fragment.value)
        for name, value in fragment.states.items():
            found[f"{name} {fragment.address.key}"] = fingerprint(value)
    for name, parameter in engine.module.named_parameters():
        held = parameter
        if hasattr(parameter, "ds_tensor"):
            # Stage 3 pads the last rank's part.
            size = parameter.ds_tensor.ds_numel
            if parameter.ds_tensor.numel() < size:
                # The tensor is swapped out to NVMe; forward passes reveal its values.
                continue
            left = parameter.ds_numel - size * engine.group.rank
            held = parameter.ds_tensor.narrow(0, 0, max(0, min(size, left)))
        found[f"low {name}"] = fingerprint(held)
    return found


def fingerprint(tensor: torch.Tensor) -> str:
    flat = tensor.detach().reshape(-1).contiguous().cpu().view(torch.uint8)
    return hashlib.sha256(flat.numpy()).hexdigest()


def swapped_groups(engine: Any) -> int:
    wrapper = getattr(getattr(engine, "deepspeed_engine", None), "optimizer", None)
    groups = getattr(wrapper, "fp32_partitioned_groups_flat", ())
    return sum(group.numel() == 0 for group in groups)


def accumulate(case: Case, disturbed: bool) -> dict[str, Any]:
    """Run two steps of two micro batches; if ``disturbed``, use the shadow between the two."""
    engine = start(case, model_for(case))
    ema = EMAShadow(decay=0.5).attach(engine)
    for index in range(4):
        loss = (engine(batch(engine, index)).float() - 0.5).pow(2).mean()
        engine.backward(loss)
        outcome = engine.step()
        if outcome.applied:
            ema.step()
        elif disturbed:
            ema.distance()
            list(ema.gather())
            with ema.swapped_in():
                forward(engine, batch(engine, 99))
    found = {"applied": engine.state.global_step, "state": state(engine, ema)}
    engine.close()
    return found
