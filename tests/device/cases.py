"""Training runs on the device, one for each engine and fast path, and what they end with."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from tests.backend.host.streaming import FAMILIES as TESTED
from tests.backend.host.streaming import FIRST, TARGETS, Web, web_batch
from zerotune.backend.compilation import Compilation, Compiled
from zerotune.checkpoint import load_checkpoint, save_checkpoint
from zerotune.ema import EMAShadow
from zerotune.ema.stores import DeviceStore, FileStore, HostStore
from zerotune.plan.context import DeviceUpdate, EngineName, Streaming
from zerotune.plan.facts import ModelFacts, inner_tensors
from zerotune.plan.optimizer.resolver import OptimizerResolver
from zerotune.plan.plan import DeepSpeedPlan
from zerotune.platform import Platform
from zerotune.training.setup import build_engine

GIB = 2**30
AHEAD = 3000


class Skipping(Web):
    """Blocks of which each pass skips one, as stochastic depth does, and detaches another."""

    def forward(self, x: torch.Tensor, skipped: int, detached: int) -> torch.Tensor:
        hidden = self.inp(x)
        for index in range(len(self.blocks)):
            if index == detached:
                hidden = hidden + self.call(index, hidden).detach()
            elif index != skipped:
                hidden = self.call(index, hidden)
        return self.out(hidden)


def skipping_batch(random_: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
    skipped, detached = torch.randperm(6, generator=random_)[:2].tolist()
    return {**web_batch(random_, dtype), "skipped": skipped, "detached": detached}


WIDTH = 1024
"""DeepSpeed swaps weights of 1 MiB and more."""


class Wide(torch.nn.Sequential):
    """Layers whose weights are large enough to be swapped."""

    def __init__(self) -> None:
        super().__init__(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def wide_batch(random_: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
    return {"input": torch.randn(2, WIDTH, generator=random_).to(dtype)}


class ChainBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(128, 128, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.silu(self.inner(x))


class Chain(torch.nn.Module):
    """Equal blocks, each of which is called once, and whose weights need no padding in units."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(128, 128, bias=False)
        self.blocks = torch.nn.ModuleList(ChainBlock() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def chain_batch(random_: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
    return {"x": torch.randn(2, 128, generator=random_).to(dtype)}


FAMILIES = {
    **TESTED,
    "skipping": (Skipping, skipping_batch),
    "wide": (Wide, wide_batch),
    "chain": (Chain, chain_batch),
}


@attrs.frozen(kw_only=True)
class Case:
    """A model, a plan, and what happens while it trains."""

    name: str
    family: str = "web"
    """``"web"`` has blocks that are called twice or share weights, ``"wide"`` has weights that are
    large enough for NVMe, ``"chain"`` calls each block once; see also ``FAMILIES``."""
    streamed: Streaming | None = None
    engine: EngineName | None = None
    update: DeviceUpdate | None = None
    stage: int = 2
    offload: str = "cpu"
    offload_param: str = "none"
    deepspeed: bool = True
    overlap: bool | None = None
    """Whether DeepSpeed reduces gradients on another stream; ``None`` is DeepSpeed's default."""
    precision: str = "bf16"
    autocast: bool = False
    """Whether the loop runs the model under autocast. The plain engine does so by itself, unless
    its precision is fp32."""
    compiled: str = ""
    """The backend of ``torch.compile``; not compiled if empty."""
    optimizer: str = "AdamW"
    accumulation: int = 1
    clipping: float = 0.05
    checkpointing: str = "off"
    """``"off"``, ``"on"``, ``"reentrant"``, or ``"offloaded"``, which copies inputs to the host."""
    lora: bool = False
    quantized: str = ""
    """Storage of the base of adapters: ``"nf4"``, ``"fp8"`` by diffusers' layerwise casting, or
    ``"torchao"`` for its fp8; not quantized if empty."""
    ema: str = "host"
    """Where the EMA is: ``"host"``, ``"device"`` or ``"file"``."""
    ema_every: int = 1
    """Optimizer steps per update of the EMA."""
    swapped_in: bool = False
    """Whether the EMA is evaluated after every second step."""
    middle: str = ""
    """What happens after half of the steps: ``"resume"`` saves, and goes on in a new engine;
    ``"exhaust"`` repeats a step that found no memory; ``"drop"`` drops graphs of forward passes;
    ``"close"`` closes after a backward pass."""
    ranks: int = 1
    steps: int = 4

    def __str__(self) -> str:
        return self.name


# -- The parts of a run.


def make_model(case: Case) -> torch.nn.Module:
    torch.manual_seed(0)
    model = FAMILIES[case.family][0]()
    if case.quantized == "fp8":
        model.bfloat16().enable_layerwise_casting(
            storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16
        )
    elif case.quantized == "torchao":
        from torchao.quantization import Float8WeightOnlyConfig, quantize_

        for block in (*model.bfloat16().transformer_blocks, *model.single_transformer_blocks):
            quantize_(block, Float8WeightOnlyConfig())
    elif case.quantized:
        _quantize(model, case.quantized)
    if case.lora:
        _add_adapters(case, model)
    model.train()
    if case.checkpointing == "on":
        model.enable_gradient_checkpointing()
    elif case.checkpointing == "reentrant":
        if case.lora:
            # Reentrant checkpoints need an input that requires a gradient, which the first lack.
            model.get_submodule({**FIRST, "web": "inp"}[case.family]).register_forward_hook(
                lambda _module, _args, output: output.requires_grad_()
            )
        model.enable_gradient_checkpointing(
            gradient_checkpointing_func=lambda f, *a: checkpoint(f, *a, use_reentrant=True)
        )
    return model


def _add_adapters(case: Case, model: torch.nn.Module) -> None:
    from zerotune.diffusion.lora import LoRA, add_lora

    add_lora(model, LoRA(rank=4, init="gaussian", targets=TARGETS.get(case.family)))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.02)


def _quantize(model: Any, kind: str) -> None:
    import bitsandbytes as bnb

    # Its kernels for unknown devices would be compiled, which fails on this one after a minute.
    torch.compiler.set_stance("force_eager")
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        for part in list(block.modules()):
            for name, child in list(part.named_children()):
                if type(child) is torch.nn.Linear:
                    made = bnb.nn.Linear4bit(
                        child.in_features, child.out_features, bias=child.bias is not None,
                        quant_type=kind, compute_dtype=torch.bfloat16,
                    )  # fmt: skip
                    made.load_state_dict(child.state_dict())
                    setattr(part, name, made.to("cpu"))


@contextlib.contextmanager
def started(case: Case, folder: Path | None = None) -> Iterator[Any]:
    """Start the case's engine on the device.

    Args:
        case: The case.
        folder: Where weights and moments on NVMe are written.
    """
    model = make_model(case)
    plan = DeepSpeedPlan.build(
        stage=case.stage, offload=case.offload, offload_param=case.offload_param,
        nvme_path=str(folder) if case.offload == "nvme" else None,
        precision=case.precision, micro_batch_size=2,
        gradient_accumulation_steps=case.accumulation, gradient_clipping=case.clipping,
        optimizer={"type": case.optimizer, "params": {"lr": 2e-3, "weight_decay": 0.01}},
        **({} if case.overlap is None else {"overlap_comm": case.overlap}),
    )  # fmt: skip
    for section, device in (("optimizer", case.offload), ("param", case.offload_param)):
        if device == "cpu":
            key = f"zero_optimization.offload_{section}.pin_memory"
            plan = plan.with_overrides({key: True})
    if case.compiled and case.stage == 3:
        # Only modules that are called once can be gathered whole.
        plan = plan.with_overrides({"zero_optimization.leaf_module.classes": ["ChainBlock"]})
    resolved = plan.resolve(
        platform=Platform.synthetic("cuda", vram=8 * GIB, ram=24 * GIB),
        model=ModelFacts.from_module(model),
        world_size=case.ranks,
        deepspeed=case.deepspeed,
        streamed=case.streamed or (None if case.engine == "host" else False),
        engine=case.engine,
        update=case.update,
    )
    with build_engine(model=model, plan=OptimizerResolver().resolve(resolved)) as engine:
        if case.checkpointing == "offloaded":
            from zerotune.diffusion.activations import ActivationOffload, StreamTransfers

            transfers = StreamTransfers(engine.device)
            offload = ActivationOffload(smallest=0, transfers=transfers).attach(engine.module)
            engine.resources.callback(offload.detach)
        if case.compiled:
            # Graphs of the previous run's blocks count towards the limit of variants.
            torch._dynamo.reset()
            blocks = None if case.streamed or case.stage == 3 else ("Block",)
            wanted = Compilation(backend=case.compiled, blocks=blocks)
            compiled = Compiled(wanted, model=engine.module, plan=engine.plan)
            compiled.apply(engine)
        yield engine
        if case.compiled:
            assert compiled.graphs


def loss_of(case: Case, engine: Any, seed: int) -> torch.Tensor:
    random_ = torch.Generator().manual_seed(seed + 10_000 * engine.group.rank)
    dtype = torch.float32 if not case.deepspeed else engine.dtype
    batch = tree_map_only(
        torch.Tensor,
        lambda tensor: tensor.pin_memory().to(engine.device, non_blocking=True),
        FAMILIES[case.family][1](random_, dtype),
    )
    with torch.autocast(engine.device.type, dtype=torch.bfloat16, enabled=case.autocast):
        out = engine(**batch)
    out = getattr(out, "sample", out)
    out = out[0] if isinstance(out, tuple) else out
    return (out.float() - 0.5).square().mean()


def average_of(case: Case, engine: Any, folder: Path) -> EMAShadow:
    stores = {"file": FileStore(folder=folder), "device": DeviceStore(), "host": HostStore()}
    ema = EMAShadow(decay=0.9, update_every=case.ema_every, store=stores[case.ema])
    return ema.attach(engine)


def advance(case: Case, engine: Any, ema: EMAShadow, steps: range, losses: list[Any]) -> list[Any]:
    """Train for these steps; append losses, which nobody waits for; return gradient norms."""
    norms = []
    for step in steps:
        for micro in range(case.accumulation):
            loss = loss_of(case, engine, 100 * step + micro)
            losses.append(loss.detach())
            engine.backward(loss)
            outcome = engine.step()
        norms.append(outcome.grad_norm)
        if outcome.applied:
            ema.step()
        if case.swapped_in and step % 2:
            with ema.swapped_in(), engine.evaluating():
                losses.append(loss_of(case, engine, 7))
    return norms


# -- What a run ends with.

_RUNS = itertools.count()


def digest(tensor: torch.Tensor) -> str:
    found = hashlib.sha256()
    for _, inner in inner_tensors(tensor.detach()):
        content = inner.cpu().contiguous().flatten().view(torch.uint8)
        found.update(content.numpy().tobytes())
    return found.hexdigest()[:16]


def contents(engine: Any, ema: EMAShadow) -> dict[str, str]:
    """Digests of masters, moments and the EMA of this rank, and of the model's own weights."""
    found = {}
    for fragment in engine.master_weights.read():
        found[f"master {fragment.address.key}"] = digest(fragment.value)
        for name, value in sorted({**fragment.states, **fragment.whole}.items()):
            found[f"{name} {fragment.address.key}"] = digest(value)
    for name, value in ema.state_dict().items():
        found[f"ema {name}"] = digest(value)
    if engine.plan.stage < 3 or engine.plan.is_hosted:
        for name, value in engine.module.state_dict().items():
            found[f"weight {name}"] = digest(value)
    return found


def run(case: Case, seed: int, lateness: float, folder: Path) -> dict[str, Any]:
    """Train; return losses, norms and digests by name.

    Args:
        case: What to run.
        seed: Seed of the order in which the device works.
        lateness: Chance that a task runs after something was queued.
        folder: Where checkpoints and files may be written.
    """
    torch.simdev.seed_order(seed, lateness, AHEAD)
    # All ranks use the same folder.
    folder = folder / str(next(_RUNS))
    folder.mkdir(exist_ok=True)
    half, losses, norms = case.steps // 2, [], []
    with started(case, folder) as engine:
        ema = average_of(case, engine, folder)
        norms += advance(case, engine, ema, range(half), losses)
        if case.middle == "resume":
            save_checkpoint(folder / "checkpoint", engine=engine, shadows={"ema": ema})
        elif case.middle == "close":
            engine.backward(loss_of(case, engine, 100 * half))
            engine.close()
            kept = {name: digest(value) for name, value in engine.module.state_dict().items()}
            return {"losses": [float(loss) for loss in losses], "norms": norms, **kept}
        else:
            if case.middle == "exhaust":
                exhaust(case, engine)
            elif case.middle == "drop":
                losses += [loss_of(case, engine, 8).detach() for _ in range(2)]
            norms += advance(case, engine, ema, range(half, case.steps), losses)
            kept = contents(engine, ema)
    if case.middle == "resume":
        with started(case, folder) as engine:
            ema = average_of(case, engine, folder)
            load_checkpoint(folder / "checkpoint", engine=engine, shadows={"ema": ema})
            norms += advance(case, engine, ema, range(half, case.steps), losses)
            kept = contents(engine, ema)
    return {"losses": [float(loss) for loss in losses], "norms": norms, **kept}


def exhaust(case: Case, engine: Any) -> None:
    """Let a forward or backward pass find no memory."""
    torch.simdev.synchronize()
    torch.simdev.limit(torch.simdev.memory_allocated() + 8192)
    try:
        engine.backward(loss_of(case, engine, 3))
    except torch.OutOfMemoryError:
        pass
    else:
        raise AssertionError("there was enough memory")
    finally:
        torch.simdev.limit(16 * GIB)


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what two runs do not have in common to the bit."""
    return sorted(name for name in {*one, *other} if str(one.get(name)) != str(other.get(name)))


# -- The matrix.

_WINDOW = Streaming(window=2)
_NAMED = Streaming(units=("blocks.0", "blocks.2", "blocks.5"), window=2)

STREAMED = Case(name="streamed, window 2", streamed=_WINDOW)
RESIDENT = Case(name="host engine", engine="host")
ZERO_2 = Case(name="ZeRO-2, CPU offload")
UPDATED = Case(
    name="update on the device", streamed=_WINDOW, update=DeviceUpdate(masters="split"),
    optimizer="Adafactor",
)  # fmt: skip


def _matrix() -> Iterator[Case]:
    def streamed(name: str, **fields: Any) -> Case:
        return attrs.evolve(STREAMED, name=f"streamed, {name}", **fields)

    def resident(name: str, **fields: Any) -> Case:
        return attrs.evolve(RESIDENT, name=f"host engine, {name}", **fields)

    def zero(stage: int, name: str, **fields: Any) -> Case:
        return attrs.evolve(ZERO_2, name=f"ZeRO-{stage}, {name}", stage=stage, **fields)

    def plain(name: str, **fields: Any) -> Case:
        return Case(name=f"plain, {name}", deepspeed=False, stage=0, **fields)

    def updated(name: str, **fields: Any) -> Case:
        return attrs.evolve(UPDATED, name=f"update on the device, {name}", **fields)

    split = Streaming(window=2, split_masters=True)
    kept, lean = DeviceUpdate(), DeviceUpdate(masters="stochastic")
    nvme = zero(3, "NVMe", family="wide", offload="nvme", offload_param="nvme")
    yield from (
        STREAMED,
        streamed("window 3", streamed=Streaming()),
        streamed("everything resident", streamed=Streaming(window=1000)),
        streamed("half of the weights resident", streamed=Streaming(memory=32 * 1024)),
        streamed("named blocks", streamed=_NAMED),
        streamed("named blocks, no clipping", streamed=_NAMED, clipping=0.0),
        streamed("U-Net", family="unet"),
        streamed("Flux", family="flux"),
        streamed("Flux, no clipping, checkpointing", family="flux", clipping=0.0,
            checkpointing="on"),
        streamed("skipped blocks", family="skipping", steps=8),
        streamed("skipped blocks, no clipping", family="skipping", clipping=0.0, steps=8),
        streamed("no clipping", clipping=0.0),
        streamed("no clipping, one gradient buffer", clipping=0.0,
            streamed=Streaming(window=2, gradient_buffers=1)),
        streamed("no clipping, U-Net", clipping=0.0, family="unet"),
        streamed("accumulation", accumulation=3),
        streamed("accumulation, no clipping", accumulation=3, clipping=0.0),
        streamed("checkpointing", checkpointing="on"),
        streamed("reentrant checkpointing", checkpointing="reentrant"),
        streamed("activation offload", checkpointing="offloaded"),
        streamed("activation offload, no clipping", checkpointing="offloaded", clipping=0.0),
        streamed("activation offload, graphs dropped", checkpointing="offloaded", middle="drop"),
        streamed("split masters", streamed=split),
        streamed("split masters, bf16 moments", streamed=split, optimizer="AdamWBF16States"),
        streamed("split masters, 8-bit moments", streamed=split, optimizer="AdamW8BitStates"),
        streamed("8-bit moments, no clipping", optimizer="AdamW8BitStates", clipping=0.0),
        streamed("LoRA", lora=True),
        # Other families call a block twice, which reentrant checkpointing does not tell in time.
        streamed("Flux, LoRA, no clipping, reentrant", family="flux", lora=True, clipping=0.0,
            checkpointing="reentrant"),
        streamed("LoRA on nf4", lora=True, quantized="nf4", family="flux"),
        streamed("LoRA on fp8", lora=True, quantized="fp8", family="flux"),
        streamed("LoRA on fp8, checkpointing", lora=True, quantized="fp8", family="flux",
            checkpointing="on"),
        streamed("LoRA on torchao's fp8", lora=True, quantized="torchao", family="flux"),
        streamed("EMA on the device", ema="device"),
        streamed("EMA in a file", ema="file"),
        streamed("EMA in a file, no clipping", ema="file", clipping=0.0),
        streamed("EMA of every second step, split masters", ema_every=2, streamed=split, steps=6),
        streamed("EMA of every second step, split masters, no clipping", ema_every=2,
            streamed=split, clipping=0.0, ema="file", steps=6),
        streamed("EMA swapped in", swapped_in=True),
        streamed("EMA swapped in, no clipping", swapped_in=True, clipping=0.0),
        streamed("resumed", middle="resume"),
        streamed("resumed, 8-bit", middle="resume", streamed=split, optimizer="AdamW8BitStates"),
        streamed("out of memory", middle="exhaust"),
        streamed("closed after backward", middle="close"),
        streamed("closed during updates", middle="close", clipping=0.0),
        streamed("fp32", precision="fp32"),
        streamed("fp32, autocast", precision="fp32", autocast=True),
        streamed("compiled", compiled="aot_eager"),
        streamed("compiled, no clipping, checkpointing", compiled="aot_eager", clipping=0.0,
            checkpointing="on"),
        UPDATED,
        updated("no clipping", clipping=0.0),
        updated("fp32 masters, AdamW", update=kept, optimizer="AdamW"),
        updated("fp32 masters, AdamW, no clipping", update=kept, optimizer="AdamW", clipping=0.0),
        updated("stochastic rounding", update=lean),
        updated("stochastic rounding, no clipping", update=lean, clipping=0.0),
        updated("stochastic rounding, resumed", update=lean, middle="resume"),
        updated("accumulation", accumulation=3),
        updated("accumulation, no clipping", accumulation=3, clipping=0.0),
        updated("skipped blocks", family="skipping", steps=8),
        updated("skipped blocks, no clipping", family="skipping", clipping=0.0, steps=8),
        updated("Flux, no clipping, checkpointing", family="flux", clipping=0.0,
            checkpointing="on"),
        updated("U-Net, resumed", family="unet", middle="resume"),
        updated("LoRA", lora=True, optimizer="AdamW"),
        updated("EMA in a file, no clipping", ema="file", clipping=0.0),
        updated("EMA swapped in", swapped_in=True),
        updated("out of memory", middle="exhaust"),
        updated("closed after backward", middle="close"),
        updated("closed during updates", middle="close", clipping=0.0),
        updated("resident", streamed=None, engine="host"),
        updated("resident, no clipping", streamed=None, engine="host", clipping=0.0),
        updated("2 ranks", ranks=2),
        updated("2 ranks, no clipping, fp32 masters", ranks=2, clipping=0.0, update=kept),
        updated("2 ranks, stochastic rounding, resumed", ranks=2, update=lean, middle="resume"),
        updated("2 ranks, resident, EMA swapped in", ranks=2, streamed=None, engine="host",
            swapped_in=True),
        RESIDENT,
        resident("no clipping", clipping=0.0),
        resident("U-Net", family="unet"),
        resident("Flux, checkpointing", family="flux", checkpointing="on"),
        resident("skipped blocks", family="skipping", steps=8),
        resident("skipped blocks, no clipping", family="skipping", clipping=0.0, steps=8),
        resident("accumulation", accumulation=3),
        resident("reentrant checkpointing", checkpointing="reentrant"),
        resident("activation offload", checkpointing="offloaded"),
        resident("bf16 moments", optimizer="AdamWBF16States"),
        resident("fp32", precision="fp32"),
        resident("fp32, autocast", precision="fp32", autocast=True),
        resident("compiled", compiled="aot_eager"),
        resident("LoRA", lora=True),
        resident("LoRA on nf4", lora=True, quantized="nf4", family="flux"),
        resident("LoRA on fp8", lora=True, quantized="fp8", family="flux"),
        resident("stage 1", stage=1),
        resident("stage 3", stage=3),
        resident("stage 3, parameters in host memory", stage=3, offload_param="cpu"),
        resident("EMA on the device", ema="device"),
        resident("EMA in a file", ema="file"),
        resident("EMA swapped in", swapped_in=True),
        resident("resumed", middle="resume"),
        resident("out of memory", middle="exhaust"),
        resident("closed", middle="close"),
        ZERO_2,
        zero(2, "CPU offload, no clipping", clipping=0.0),
        zero(2, "CPU offload, accumulation", accumulation=3),
        zero(2, "CPU offload, checkpointing", checkpointing="on"),
        zero(2, "CPU offload, EMA in a file", ema="file"),
        zero(2, "CPU offload, EMA swapped in", swapped_in=True),
        zero(2, "CPU offload, resumed", middle="resume"),
        zero(2, "CPU offload, closed", middle="close"),
        zero(2, "CPU offload, fp32, autocast", precision="fp32", autocast=True),
        zero(2, "CPU offload, LoRA on nf4", lora=True, quantized="nf4", family="flux"),
        zero(2, "CPU offload, activation offload", checkpointing="offloaded"),
        zero(2, "CPU offload, out of memory", middle="exhaust"),
        zero(2, "CPU offload, Flux", family="flux"),
        zero(0, "no offload", offload="none"),
        zero(1, "no offload", offload="none"),
        zero(1, "CPU offload"),
        zero(2, "no offload", offload="none"),
        zero(2, "no offload, EMA on the device", offload="none", ema="device", swapped_in=True),
        zero(2, "no offload, activation offload", offload="none", checkpointing="offloaded"),
        zero(2, "no offload, activation offload, graphs dropped", offload="none",
             checkpointing="offloaded", middle="drop"),
        zero(3, "no offload", offload="none"),
        zero(3, "CPU offload"),
        zero(3, "CPU offload of both", offload_param="cpu"),
        zero(3, "CPU offload of both, U-Net", offload_param="cpu", family="unet"),
        zero(3, "CPU offload of both, Flux", offload_param="cpu", family="flux"),
        zero(3, "CPU offload of both, checkpointing", offload_param="cpu", checkpointing="on"),
        zero(3, "CPU offload of both, EMA swapped in", offload_param="cpu", swapped_in=True),
        zero(3, "CPU offload of both, EMA on the device", offload_param="cpu", ema="device"),
        zero(3, "CPU offload of both, EMA in a file", offload_param="cpu", ema="file"),
        zero(3, "CPU offload of both, no clipping", offload_param="cpu", clipping=0.0),
        zero(3, "CPU offload of both, accumulation", offload_param="cpu", accumulation=3),
        zero(3, "CPU offload of both, activation offload", offload_param="cpu",
            checkpointing="offloaded"),
        zero(3, "CPU offload of both, LoRA", offload_param="cpu", lora=True),
        zero(3, "CPU offload of both, compiled", offload_param="cpu", compiled="aot_eager",
            family="chain"),
        zero(3, "CPU offload of both, resumed", offload_param="cpu", middle="resume"),
        zero(3, "CPU offload of both, out of memory", offload_param="cpu", middle="exhaust"),
        zero(3, "CPU offload of both, closed", offload_param="cpu", middle="close"),
        zero(3, "optimizer on NVMe", family="wide", offload="nvme"),
        nvme,
        attrs.evolve(nvme, name="ZeRO-3, NVMe, accumulation", accumulation=3),
        attrs.evolve(nvme, name="ZeRO-3, NVMe, resumed", middle="resume"),
        resident("2 ranks", ranks=2),
        resident("2 ranks, EMA swapped in", ranks=2, swapped_in=True),
        resident("2 ranks, stage 3", ranks=2, stage=3),
        resident("2 ranks, stage 3, no clipping, EMA swapped in", ranks=2, stage=3, clipping=0.0,
            swapped_in=True),
        resident("2 ranks, stage 3, resumed", ranks=2, stage=3, middle="resume"),
        streamed("2 ranks", ranks=2),
        streamed("2 ranks, no clipping", ranks=2, clipping=0.0),
        streamed("2 ranks, half of the weights resident", ranks=2,
            streamed=Streaming(memory=32 * 1024)),
        streamed("2 ranks, named blocks", ranks=2, streamed=_NAMED),
        streamed("2 ranks, accumulation", ranks=2, accumulation=3),
        streamed("2 ranks, EMA swapped in", ranks=2, swapped_in=True),
        streamed("2 ranks, resumed", ranks=2, middle="resume"),
        streamed("2 ranks, LoRA, EMA swapped in", ranks=2, lora=True, swapped_in=True),
        zero(1, "2 ranks, no offload", ranks=2, offload="none"),
        zero(2, "2 ranks, no offload", ranks=2, offload="none"),
        zero(2, "2 ranks, CPU offload", ranks=2),
        zero(3, "2 ranks, no offload", ranks=2, offload="none"),
        zero(3, "2 ranks, CPU offload of both", ranks=2, offload_param="cpu"),
        zero(3, "2 ranks, CPU offload of both, resumed", ranks=2, offload_param="cpu",
            middle="resume"),
        attrs.evolve(nvme, name="ZeRO-3, 2 ranks, NVMe", ranks=2),
        plain("no offload", offload="none"),
        plain("no offload, EMA on the device", offload="none", ema="device", swapped_in=True),
        plain("no offload, activation offload", offload="none", checkpointing="offloaded"),
        plain("no offload, checkpointing", offload="none", checkpointing="on"),
        plain("no offload, LoRA on nf4", offload="none", lora=True, quantized="nf4",
            family="flux"),
        plain("no offload, compiled", offload="none", compiled="aot_eager"),
        plain("no offload, fp32", offload="none", precision="fp32"),
        plain("no offload, resumed", offload="none", middle="resume"),
        plain("no offload, 2 ranks", offload="none", ranks=2),
        plain("offload"),
        plain("offload, no clipping", clipping=0.0),
        plain("offload, EMA on the device", ema="device"),
        plain("offload, resumed", middle="resume"),
        plain("offload, 2 ranks", ranks=2),
        plain("offload, U-Net", family="unet"),
        plain("offload, Flux", family="flux"),
        plain("offload, skipped blocks", family="skipping", steps=8),
        plain("offload, accumulation", accumulation=3),
        plain("offload, EMA in a file, swapped in", ema="file", swapped_in=True),
        plain("offload, closed", middle="close"),
        plain("offload, out of memory", middle="exhaust"),
    )  # fmt: skip


CASES = tuple(_matrix())
