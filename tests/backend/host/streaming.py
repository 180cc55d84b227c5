"""Small models of every family, and a training run that works under any engine."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from zerotune.backend.compilation import Compilation, Compiled
from zerotune.backend.launch import Launch
from zerotune.ema import EMAShadow
from zerotune.optim import ParameterGroups
from zerotune.plan.context import DeviceUpdate, EngineName, Streaming
from zerotune.plan.facts import ModelFacts, inner_tensors
from zerotune.plan.optimizer.resolver import OptimizerResolver
from zerotune.plan.plan import DeepSpeedPlan
from zerotune.training.setup import build_engine

BATCH = 2


def unet() -> torch.nn.Module:
    """Build a U-Net like SDXL's, with 15 units."""
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1,
        block_out_channels=(32, 64), norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2), attention_head_dim=8, use_linear_projection=True,
        cross_attention_dim=32, addition_embed_type="text_time", addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + 32,
    )  # fmt: skip


def unet_batch(random_: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random_).to(dtype)

    return {
        "sample": draw(BATCH, 4, 8, 8),
        "timestep": torch.randint(0, 1000, (BATCH,), generator=random_),
        "encoder_hidden_states": draw(BATCH, 7, 32),
        "added_cond_kwargs": {"text_embeds": draw(BATCH, 32), "time_ids": draw(BATCH, 6)},
    }


def flux() -> torch.nn.Module:
    """Build a Flux model with two kinds of blocks and 5 units."""
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=3, attention_head_dim=16,
        num_attention_heads=4, joint_attention_dim=32, pooled_projection_dim=32,
        guidance_embeds=True, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip


def flux_batch(random_: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
    ids = torch.zeros(16, 3)
    ids[:, 1], ids[:, 2] = torch.arange(16) // 4, torch.arange(16) % 4
    return {
        "hidden_states": torch.randn(BATCH, 16, 16, generator=random_).to(dtype),
        "timestep": torch.rand(BATCH, generator=random_).to(dtype),
        "guidance": torch.full((BATCH,), 3.5).to(dtype),
        "pooled_projections": torch.randn(BATCH, 32, generator=random_).to(dtype),
        "encoder_hidden_states": torch.randn(BATCH, 5, 32, generator=random_).to(dtype),
        "txt_ids": torch.zeros(5, 3),
        "img_ids": ids,
    }


def qwen() -> torch.nn.Module:
    """Build a Qwen-Image model with 4 units, without training what gets no gradient."""
    from diffusers import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=4, attention_head_dim=16,
        num_attention_heads=3, joint_attention_dim=16, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    model(**qwen_batch(torch.Generator(), torch.float32)).sample.sum().backward()
    for parameter in model.parameters():
        # DeepSpeed updates such weights with zeros, and the host engine leaves them as they are.
        parameter.requires_grad_(parameter.grad is not None).grad = None
    return model


def qwen_batch(random_: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(BATCH, 16, 16, generator=random_).to(dtype),
        "timestep": torch.rand(BATCH, generator=random_).to(dtype),
        "encoder_hidden_states": torch.randn(BATCH, 5, 16, generator=random_).to(dtype),
        "encoder_hidden_states_mask": torch.ones(BATCH, 5, dtype=torch.long),
        "img_shapes": [[(1, 4, 4)]] * BATCH,
    }


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = torch.nn.Linear(width, 2 * width)
        self.b = torch.nn.Linear(2 * width, width)
        self.n = torch.nn.RMSNorm(width)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = self.b(torch.nn.functional.gelu(self.a(self.n(x))))
        return x + (y if scale is None else y * scale)


class Web(torch.nn.Module):
    """Blocks called twice, a block used again later, weights tied across blocks, a skip."""

    _supports_gradient_checkpointing = True

    def __init__(self, width: int = 30) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(6))
        self.blocks[4].a.weight = self.blocks[1].a.weight
        self.inp, self.out = torch.nn.Linear(8, width), torch.nn.Linear(width, 5)
        self.gradient_checkpointing = False
        self._gradient_checkpointing_func: Any = None

    def enable_gradient_checkpointing(self, gradient_checkpointing_func: Any = None) -> None:
        self.gradient_checkpointing = True
        self._gradient_checkpointing_func = gradient_checkpointing_func or (
            lambda block, *args: checkpoint(block, *args, use_reentrant=False)
        )

    def call(self, index: int, *args: torch.Tensor) -> torch.Tensor:
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return self._gradient_checkpointing_func(self.blocks[index], *args)
        return self.blocks[index](*args)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inp(x)
        skip = hidden = self.call(0, hidden)
        for index in (1, 1, 2):
            hidden = self.call(index, hidden)
        hidden = self.call(3, hidden, torch.sigmoid(skip))
        hidden = self.call(0, hidden)
        hidden = self.call(4, hidden) + skip
        return self.out(self.call(5, hidden))


def web_batch(random_: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
    return {"x": torch.randn(4, 8, generator=random_).to(dtype)}


class Apart(torch.nn.Module):
    """A model that uses weights in many ways, mostly outside their own module's call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = torch.nn.Linear(6, 6).requires_grad_(False)
        self.attention = torch.nn.MultiheadAttention(6, 2, batch_first=True)
        self.recurrent = torch.nn.GRU(6, 6, batch_first=True)
        self.twice = torch.nn.Linear(6, 6)
        self.tied = torch.nn.Linear(6, 6, bias=False)
        self.tied.weight = self.twice.weight
        self.never = torch.nn.Linear(6, 2)
        self.again = torch.nn.Sequential(torch.nn.Linear(6, 17), torch.nn.Linear(17, 6))
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.large = torch.nn.Linear(6, 301)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(x)
        x = x + self.attention(x, x, x, need_weights=False)[0] + self.recurrent(x)[0]
        x = self.tied(torch.tanh(self.twice(self.twice(x))))
        # Not left out, since the host engine would leave these weights as they are.
        x = x + self.never(x).sum() * 0
        x = x + checkpoint(self.again, x, use_reentrant=False)
        return self.large(x) * self.scale.sum() + torch.nn.functional.linear(
            x, self.large.weight, self.large.bias
        )


def apart_batch(random_: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
    return {"x": torch.randn(2, 3, 6, generator=random_).to(dtype)}


FAMILIES = {
    "apart": (Apart, apart_batch),
    "unet": (unet, unet_batch),
    "flux": (flux, flux_batch),
    "qwen": (qwen, qwen_batch),
    "web": (Web, web_batch),
}


@attrs.frozen(kw_only=True)
class Run:
    """Model and settings of a training run, the same under every engine."""

    family: str = "flux"
    checkpointing: str = "off"
    accumulation: int = 1
    clipping: float = 0.05
    lora: bool = False
    groups: bool = False
    precision: str = "bf16"
    steps: int = 6
    scheduler: bool = True
    evaluate: bool = False
    optimizer: str = "AdamW"
    compiled: str = ""
    """The backend that compiles the blocks; none if empty."""

    def __str__(self) -> str:
        optimizer = "" if self.optimizer == "AdamW" else f" {self.optimizer}"
        kind = "lora" if self.lora else "full"
        parts = [f"{self.family}{optimizer}", kind, f"checkpoints-{self.checkpointing}"]
        parts += [self.compiled] if self.compiled else []
        return "-".join([*parts, f"x{self.accumulation}", f"clip{self.clipping}"])


def add_adapters(run: Run, model: torch.nn.Module) -> None:
    """Add non-zero adapters, so that every one of them has a gradient."""
    from zerotune.diffusion.lora import LoRA, add_lora

    add_lora(model, LoRA(rank=4, init="gaussian", targets=TARGETS.get(run.family)))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.02)


def make_model(run: Run) -> torch.nn.Module:
    torch.manual_seed(0)
    model = FAMILIES[run.family][0]()
    if run.lora:
        add_adapters(run, model)
    model.train()
    if run.checkpointing == "on":
        model.enable_gradient_checkpointing()
    elif run.checkpointing == "reentrant":
        if run.lora:
            # Reentrant checkpoints need an input that requires a gradient, which the first lack.
            model.get_submodule(FIRST[run.family]).register_forward_hook(
                lambda _module, _args, output: output.requires_grad_()
            )
        model.enable_gradient_checkpointing(
            gradient_checkpointing_func=lambda f, *a: checkpoint(f, *a, use_reentrant=True)
        )
    return model


TARGETS = {"web": ("a", "b")}
FIRST = {"unet": "conv_in", "flux": "x_embedder", "qwen": "img_in"}


def start(
    run: Run,
    model: torch.nn.Module,
    *,
    streamed: Streaming | bool | None = None,
    engine: EngineName | None = None,
    update: DeviceUpdate | None = None,
    stage: int = 2,
    deepspeed: bool = True,
    timeout_s: float = 600.0,
) -> Any:
    """Start an engine: DeepSpeed's, unless weights are streamed or ``engine`` is the host's."""
    scheduler = {"type": "WarmupLR", "params": {
        "warmup_min_lr": 1e-4, "warmup_max_lr": 2e-3, "warmup_num_steps": 9}}  # fmt: skip
    plan = DeepSpeedPlan.build(
        stage=stage, offload="cpu", precision=run.precision, micro_batch_size=BATCH,
        gradient_clipping=run.clipping, gradient_accumulation_steps=run.accumulation,
        optimizer={"type": run.optimizer, "params": {"lr": 2e-3, "weight_decay": 0.01}},
        scheduler=scheduler if run.scheduler else None,
    )  # fmt: skip
    resolved = plan.resolve(
        model=ModelFacts.from_module(model),
        streamed=streamed,
        engine=engine or (None if streamed else "deepspeed"),
        update=update,
        deepspeed=deepspeed,
        world_size=Launch.from_environment().world_size,
    )
    resolver = OptimizerResolver(groups=ParameterGroups.no_decay() if run.groups else None)
    return build_engine(model=model, plan=resolver.resolve(resolved), timeout_s=timeout_s)


def compile_blocks(run: Run, engine: Any) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    blocks = ("Block",) if run.family == "web" and not engine.plan.streamed else None
    wanted = Compilation(backend=run.compiled, blocks=blocks)
    Compiled(wanted, model=engine.module, plan=engine.plan).apply(engine)


def loss_of(run: Run, engine: Any, seed: int) -> torch.Tensor:
    random_ = torch.Generator().manual_seed(seed)
    out = engine(**FAMILIES[run.family][1](random_, engine.dtype))
    out = getattr(out, "sample", out)
    return (out.float() - 0.5).square().mean()


def advance(run: Run, engine: Any, steps: range, ema: Any = None) -> dict[str, list[Any]]:
    """Train for these steps; return losses and norms."""
    losses: list[float] = []
    norms: list[Any] = []
    for step in steps:
        for micro in range(run.accumulation):
            # Each rank has its own batches.
            loss = loss_of(run, engine, 100 * step + micro + 10_000 * engine.group.rank)
            losses.append(float(loss.detach()))
            engine.backward(loss)
            outcome = engine.step()
        norms.append(outcome.grad_norm)
        if ema is not None and outcome.applied:
            ema.step()
        if run.evaluate and step % 3 == 1:
            with engine.evaluating():
                losses.append(float(loss_of(run, engine, 7)))
    return {"losses": losses, "norms": norms}


def weights_of(module: torch.nn.Module) -> dict[str, list[torch.Tensor]]:
    """Copy parameters and buffers as they are; ``state_dict`` refuses partitioned ones."""
    named = itertools.chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )
    return {
        name: [tensor.detach().clone() for _, tensor in inner_tensors(value)]
        for name, value in named
    }


def contents(engine: Any, ema: Any = None) -> dict[str, list[torch.Tensor]]:
    """Copy weights, masters, moments and EMAs, by name."""
    found = weights_of(engine.module)
    for fragment in engine.master_weights.read():
        assert fragment.address.numel == fragment.address.full_numel
        states = [value.clone() for _, value in sorted(fragment.states.items())]
        found[fragment.address.name] += [
            fragment.value.clone(),
            *states,
            torch.tensor(fragment.step or 0),
        ]
    if ema is not None:
        for name, value in ema.state_dict().items():
            found[f"ema {name}"] = [value.clone()]
    return found


def gathered(engine: Any, ema: Any = None) -> dict[str, list[torch.Tensor]]:
    """Return the same as ``contents``, gathered from all ranks."""
    found = weights_of(engine.module)
    for source in (None, *(lambda f, n=n: f.states[n] for n in ("exp_avg", "exp_avg_sq"))):
        for name, value in engine.master_weights.gather(source):
            found[name].append(value)
    for name, value in ema.gather() if ema is not None else ():
        found[name].append(value)
    return found


def train(run: Run, *, streamed: Any = None, seed: int | None = None, **how: Any) -> dict[str, Any]:
    """Train and return all results of the run."""
    with delays(seed), start(run, make_model(run), streamed=streamed, **how) as engine:
        if run.compiled:
            compile_blocks(run, engine)
        ema = EMAShadow(decay=0.9).attach(engine)
        kept: dict[str, Any] = advance(run, engine, range(run.steps), ema)
        of_all = contents if engine.group.world_size == 1 else gathered
        kept["contents"] = of_all(engine, ema)
        if run.compiled:
            kept["compiled"] = dict(torch._dynamo.utils.counters["stats"])
        kept["engine"], kept["counts"] = type(engine).__name__, getattr(engine, "counts", None)
        kept["decisions"] = engine.decisions
        units = getattr(engine, "_units", ())
        kept["units"] = {unit.name: unit.nbytes for unit in units if not unit.resident}
        kept["resident"] = sum(unit.nbytes for unit in units if unit.resident)
    return kept


@contextlib.contextmanager
def delays(seed: int | None) -> Iterator[None]:
    """Add random delays to every lane and every pass."""
    if seed is None:
        yield
        return
    from zerotune.backend.host import lanes, passes

    chance, lock = random.Random(seed), threading.Lock()

    def slow(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with lock:
                seconds = chance.random() * 0.002
            time.sleep(seconds)
            return original(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes.Lane, "_queue", slow(lanes.Lane._queue))
        patch.setattr(passes.UnitPass, "take", slow(passes.UnitPass.take))
        yield


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """List the results of two runs that are not bit-identical."""
    found = [n for n in ("losses", "norms", "compiled") if one.get(n) != other.get(n)]
    mine, theirs = one["contents"], other["contents"]
    found += sorted(mine.keys() ^ theirs.keys())
    for name in sorted(mine.keys() & theirs.keys()):
        same = len(mine[name]) == len(theirs[name])
        if not same or not all(map(torch.equal, mine[name], theirs[name])):
            found.append(name)
    return found
