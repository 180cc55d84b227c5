"""Real training on leased swap folders: raw DeepSpeed, accelerate, and zerotune's own engine."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch

from zerotune.offload import OffloadManager
from zerotune.offload.space import swap_needs
from zerotune.optim import OptimizerResolver
from zerotune.plan import DeepSpeedPlan, ModelFacts

LR = 1e-3


def swapping_unet(seed: int = 0) -> Any:
    """Return a diffusers U-Net of which most tensors take more than 1 MiB per rank."""
    from diffusers import UNet2DModel

    torch.manual_seed(seed)
    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(16, 192),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
        add_attention=False,
    )


def wide_net(seed: int = 0) -> torch.nn.Module:
    """Return a network of mostly two swapped layers, which starts and stops quickly."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(33, 760),
        torch.nn.Tanh(),
        torch.nn.Linear(760, 761),
        torch.nn.Tanh(),
        torch.nn.Linear(761, 760),
        torch.nn.Linear(760, 5),
    )


def plan_for(*, param: str = "cpu", optimizer: str = "nvme", precision: str = "fp32") -> Any:
    return DeepSpeedPlan.build(
        stage=3,
        offload=optimizer,
        offload_param=param,
        precision=precision,
        micro_batch_size=2,
        optimizer={"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        sub_group_size=1_500_000,
        stage3_param_persistence_threshold=0,
    )


def resolved_for(model: torch.nn.Module, plan: DeepSpeedPlan) -> Any:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    resolved = plan.resolve(model=ModelFacts.from_module(model), world_size=world_size)
    return OptimizerResolver().resolve(resolved)


def unet_loss(engine: Any, rank: int) -> torch.Tensor:
    """Return the loss on the same data at each step: few steps show whether the model learns."""
    generator = torch.Generator().manual_seed(rank)
    images = torch.randn(2, 1, 8, 8, generator=generator)
    times = torch.randint(0, 1000, (2,), generator=generator)
    output = engine(images, times).sample
    return (output - images.tanh()).pow(2).mean()


def engine_dtype(engine: Any) -> torch.dtype:
    """Precision of the forward pass of zerotune's engine or DeepSpeed's."""
    kind: torch.dtype = getattr(engine, "dtype", None) or engine.get_data_types()[0]
    return kind


def net_loss(engine: Any, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(4, 33, generator=generator)
    return (engine(x.to(engine_dtype(engine))).float() - 1).pow(2).mean()


def share_and_barrier() -> dict[str, Any]:
    """Return ``lease`` arguments that use ``torch.distributed``, if there are several ranks."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return {}

    def share(text: str) -> str:
        box = [text]
        dist.broadcast_object_list(box, src=0)
        return str(box[0])

    return {"rank": dist.get_rank(), "share": share, "barrier": dist.barrier}


def written(folder: Path) -> dict[str, tuple[int, int]]:
    """Return bytes and number of this rank's swap files, by swapped part."""
    rank = int(os.environ.get("RANK", "0"))
    found: dict[str, tuple[int, int]] = {}
    for part in sorted((folder / "zero_stage_3").iterdir()):
        sizes = [file.stat().st_size for file in (part / f"rank{rank}").glob("*.swp")]
        found["optimizer" if part.name == "optimizer" else "param"] = (sum(sizes), len(sizes))
    return found


def foretold(plan: Any) -> dict[str, tuple[int, int]]:
    return {target: (one.nbytes, one.count) for target, one in swap_needs(plan).files.items()}


def raw_deepspeed(root: str, steps: int, plan: DeepSpeedPlan) -> dict[str, Any]:
    """Run a raw DeepSpeed loop on a leased folder."""
    import deepspeed

    from zerotune.backend.deepspeed.sharded import align_swapped_gradients
    from zerotune.backend.op_builds import same_ninja

    os.environ.setdefault("LOCAL_RANK", "0")
    if "WORLD_SIZE" in os.environ:
        deepspeed.init_distributed(dist_backend="gloo")
    else:
        alone()
    model = swapping_unet()
    resolved = resolved_for(model, plan)
    with (
        same_ninja(),
        OffloadManager(root=root).lease(resolved, **share_and_barrier()) as lease,
    ):
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=list(model.parameters()),
            config=lease.plan.to_deepspeed(),
        )
        align_swapped_gradients(engine)
        losses = []
        for _ in range(steps):
            loss = unet_loss(engine, int(os.environ.get("RANK", "0")))
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
        found = {
            "losses": losses,
            "written": written(lease.path) if lease.path else {},
            "foretold": foretold(lease.plan),
            "path": str(lease.path),
        }
        engine.destroy()
    return found


def alone() -> None:
    """Start a process group of one rank; otherwise DeepSpeed would look for MPI."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def accelerate_loop(root: str, steps: int, plan: DeepSpeedPlan) -> dict[str, Any]:
    """Run the same loop through accelerate, with the smaller model."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DummyOptim

    from tests.support.ranks import free_port
    from zerotune.backend.deepspeed.sharded import align_swapped_gradients
    from zerotune.backend.op_builds import same_ninja

    os.environ |= {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    model = wide_net()
    with same_ninja(), OffloadManager(root=root).lease(resolved_for(model, plan)) as lease:
        plugin = DeepSpeedPlugin(hf_ds_config=lease.plan.to_deepspeed())
        accelerator = Accelerator(deepspeed_plugin=plugin)
        data = torch.utils.data.DataLoader(torch.zeros(4, 4), batch_size=2)
        engine, *_ = accelerator.prepare(model, DummyOptim(model.parameters()), data)
        align_swapped_gradients(engine)
        losses = []
        for step in range(steps):
            loss = net_loss(engine, step, 0)
            losses.append(float(loss.detach()))
            accelerator.backward(loss)
        found = {
            "losses": losses,
            "written": written(lease.path),
            "foretold": foretold(lease.plan),
            "path": str(lease.path),
        }
        engine.destroy()
    found["left"] = [path.name for path in Path(root).iterdir()]
    return found


def two_at_once(root: str, steps: int, plan: DeepSpeedPlan) -> dict[str, Any]:
    """Run two engines in one process, alternating on the same data, each on its own lease."""
    import zerotune

    manager = OffloadManager(root=root)
    with (
        zerotune.prepare(model=wide_net(), plan=plan, offload=manager) as first,
        zerotune.prepare(model=wide_net(), plan=plan, offload=manager) as second,
    ):
        losses: list[list[float]] = [[], []]
        for step in range(steps):
            for own, engine in zip(losses, (first, second), strict=True):
                loss = net_loss(engine, step, 0)
                own.append(float(loss.detach()))
                engine.backward(loss)
                engine.step()
        folders = sorted(Path(root).iterdir())
        found = {
            "losses": losses,
            "written": [written(folder) for folder in folders],
            "foretold": foretold(first.plan),
        }
    return found | {"left": [path.name for path in Path(root).iterdir()]}


def fill(disk: str) -> Path:
    """Fill a disk with a file."""
    other = Path(disk) / "other"
    with contextlib.suppress(OSError), other.open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass
    return other
