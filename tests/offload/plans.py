"""Plans for the tests of the swap lease; imported by tests and by the processes they start."""

from __future__ import annotations

from zerotune.optim import OptimizerResolver
from zerotune.plan import DeepSpeedPlan
from zerotune.platform import Platform


def swapping_plan(
    *,
    param=None,
    optimizer=None,
    swap_param=True,
    swap_optimizer=True,
    lr=1e-4,
    world_size=1,
    aio=None,
    model=None,
):
    """Return a settled plan; ``param`` and ``optimizer`` are its NVMe paths, if any."""
    zero = {"stage": 3}
    for key, swaps, path in (
        ("offload_param", swap_param, param),
        ("offload_optimizer", swap_optimizer, optimizer),
    ):
        zero[key] = {"device": "nvme" if swaps else "cpu"}
        if path:
            zero[key]["nvme_path"] = str(path)
    plan = DeepSpeedPlan.from_dict(
        {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": zero,
            **({"aio": aio} if aio else {}),
            "optimizer": {"type": "AdamW", "params": {"lr": lr}},
        }
    )
    resolved = plan.resolve(platform=Platform.synthetic(), world_size=world_size, model=model)
    return OptimizerResolver().resolve(resolved)


def plain_plan(**options):
    return swapping_plan(swap_param=False, swap_optimizer=False, **options)
