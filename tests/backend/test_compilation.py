"""Compiled models train as uncompiled ones do, at every stage, and are restored on closing."""

from __future__ import annotations

import pytest
import torch

from tests.support.ranks import run_ranks
from zerotune.backend.compilation import Compilation, Compiled
from zerotune.errors import EngineError, InvalidValueError, VerificationError
from zerotune.plan import DeepSpeedPlan, ModelFacts
from zerotune.platform import Platform


class Block(torch.nn.Module):
    """A small block, because every process traces every kind of block anew."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inward = torch.nn.Linear(width, 2 * width)
        self.outward = torch.nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.outward(torch.tanh(self.inward(x)))


class Stack(torch.nn.Module):
    _repeated_blocks = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(4, 6)
        self.blocks = torch.nn.ModuleList(Block(6) for _ in range(3))
        self.last = torch.nn.Linear(6, 4)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def losses(stage: int, deepspeed: bool, wanted: Compilation | None, count: int = 4):
    """Train a few steps; return losses, what was compiled, and what is left of it after closing."""
    from zerotune import prepare

    model = Stack()
    plan = DeepSpeedPlan.build(
        stage=stage,
        precision="fp32",
        micro_batch_size=8,
        optimizer={"type": "AdamW", "params": {"lr": 1e-2}},
        stage3_param_persistence_threshold=0,
        **({"leaf_module": {"classes": ["Block"]}} if stage == 3 else {}),
    )
    found = []
    partitioned = None
    with prepare(model=model, plan=plan, deepspeed=deepspeed, compile=wanted or False) as engine:
        generator = torch.Generator().manual_seed(1)
        for _ in range(count):
            x = torch.randn(8, 4, generator=generator)
            loss = (engine(x) - x.flip(1)).pow(2).mean()
            found.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
        if stage == 3:
            partitioned = all(p.numel() == 0 for p in model.parameters())
        compiled = None
        if wanted is not None:
            from zerotune.backend.compilation import compiled_for

            compiled = compiled_for(engine)
            compiled = compiled.graphs, compiled.graph_breaks, compiled.verify().severity
    clean = not any("forward" in vars(module) for module in model.blocks)
    return found, compiled, partitioned, clean


BLOCKS = Compilation(backend="aot_eager", fullgraph=True)
WHOLE = Compilation(backend="aot_eager", fullgraph=True, blocks=())


def several(cases):
    return [losses(*case) for case in cases]


def test_the_plain_engine_compiles_the_whole_model():
    eager, whole = run_ranks(several, [(0, False, None), (0, False, WHOLE)])[0]
    _same(eager, whole, graphs=1)


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_blocks_compile_without_graph_breaks_at_every_stage(stage):
    eager, blocks = run_ranks(several, [(stage, True, None), (stage, True, BLOCKS)])[0]
    _same(eager, blocks, graphs=1)
    assert blocks[2] is (True if stage == 3 else None), "stage 3 really partitions"


@pytest.mark.nightly  # g++ takes a minute; other tests use another backend.
def test_inductor_writes_code_for_this_cpu(tmp_path):
    wanted = Compilation()
    eager, compiled = run_ranks(
        several,
        [(0, False, None), (0, False, wanted)],
        env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"},
    )[0]
    _same(eager, compiled, graphs=1)
    assert list(tmp_path.rglob("*.cpp")), "the code it wrote"


def _same(eager, compiled, *, graphs):
    assert compiled[0] == pytest.approx(eager[0], rel=5e-5)
    assert len(set(eager[0])) == len(eager[0])
    assert compiled[1] == (graphs, 0, "note"), "one graph for all blocks of a kind"
    assert compiled[3], "the model is as it was"


def resolved(stage):
    plan = DeepSpeedPlan.build(stage=stage, micro_batch_size=1)
    return plan.resolve(platform=Platform.synthetic(), model=ModelFacts.from_module(Stack()))


def test_models_that_cannot_be_compiled_are_refused_with_the_reason():
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(EngineError, match="the plan has none for this model"):
        Compiled(BLOCKS, model=plain, plan=resolved(3))
    with pytest.raises(EngineError, match=r"no blocks of these classes.*'Block'"):
        Compiled(Compilation(blocks=["Blok"]), model=Stack(), plan=resolved(2))


def test_compile_options_are_parsed_and_unknown_ones_refused():
    assert Compilation.of(False) is None
    assert Compilation.of(True) == Compilation()
    assert Compilation.of({"blocks": ["Block"]}).blocks == ("Block",)
    with pytest.raises(InvalidValueError, match="unknown options 'bakend'"):
        Compilation.of({"bakend": "inductor"})


def test_a_step_without_a_compiled_graph_fails_verification():
    compiled = Compiled(BLOCKS, model=Stack(), plan=resolved(2))
    with pytest.raises(VerificationError, match="no graph was compiled"):
        compiled.verify()
