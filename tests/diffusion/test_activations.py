"""Checkpointed activations offloaded to host memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.runs import Case, start, unet_loss
from tests.support.sampling import nightly
from zerotune.diffusion import ActivationOffload
from zerotune.diffusion.activations import (
    BlockPool,
    KeptTransfers,
    Loading,
    Stored,
    StreamTransfers,
    _dense_parts,
    stored_strides,
)
from zerotune.errors import InvalidValueError, TrainingError


class RecordingTransfers:
    """A device whose copies end only when they are waited for.

    Loaded tensors hold garbage until ``finish``, and buffers released or dropped early are
    overwritten, so that a missing wait shows in the gradients.
    """

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.names: dict[int, int] = {}
        self.held = 0
        self.most = 0
        self.on_their_way = 0

    def store(self, tensor: torch.Tensor) -> Stored:
        host = tensor.detach().clone()
        self.names[id(host)] = len(self.names)
        self.held += 1
        self.most = max(self.most, self.held)
        self._say("store", host)
        return Stored(tensor=host, device=tensor.device)

    def settle(self, stored: Stored) -> None:
        self._say("settle", stored.tensor)

    def load(self, stored: Stored) -> Loading:
        self.on_their_way += 1
        self._say("load", stored.tensor)
        return Loading(tensor=torch.full_like(stored.tensor, float("nan")), event=stored.tensor)

    def finish(self, loading: Loading) -> torch.Tensor:
        self.on_their_way -= 1
        self._say("finish", loading.event)
        loading.tensor.copy_(loading.event)
        return loading.tensor

    def release(self, stored: Stored) -> None:
        self.held -= 1
        stored.tensor.fill_(float("nan"))

    def _say(self, what: str, host: torch.Tensor) -> None:
        self.events.append((what, self.names[id(host)]))


def text_unet() -> Any:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=16,
        layers_per_block=2,
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        norm_num_groups=4,
        attention_head_dim=4,
        cross_attention_dim=12,
    )


def flux() -> Any:
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    return FluxTransformer2DModel(
        in_channels=4,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=12,
        pooled_projection_dim=8,
        axes_dims_rope=(2, 2, 4),
        guidance_embeds=False,
    )


def inputs(model: Any, size: int = 16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    if type(model).__name__.startswith("Flux"):
        return {
            "hidden_states": noise(2, 36, 4),
            "encoder_hidden_states": noise(2, 5, 12),
            "pooled_projections": noise(2, 8),
            "timestep": torch.tensor([0.1, 0.7]),
            "img_ids": torch.zeros(36, 3),
            "txt_ids": torch.zeros(5, 3),
        }
    return {
        "sample": noise(2, 4, size, size),
        "timestep": torch.tensor([3, 900]),
        "encoder_hidden_states": noise(2, 5, 12),
    }


def gradients(model: Any, size: int = 16) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**inputs(model, size), return_dict=False)[0].float().pow(2).mean()
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def assert_same(left: Any, right: Any) -> None:
    assert torch.equal(left[0], right[0])
    assert left[1].keys() == right[1].keys()
    for name, gradient in left[1].items():
        assert torch.equal(gradient, right[1][name]), name


@pytest.mark.parametrize("make", [text_unet, flux])
@pytest.mark.parametrize("ahead", [1, 3])
def test_results_are_exact_and_every_copy_is_awaited(make: Any, ahead: int) -> None:
    model = make()
    model.enable_gradient_checkpointing()
    wanted = gradients(model)
    transfers = RecordingTransfers()
    offload = ActivationOffload(smallest=0, ahead=ahead, transfers=transfers).attach(model)
    assert_same(gradients(model), wanted)
    assert offload.counts.stored > 3
    assert offload.counts.fetched_late == 0, "each was on its way before it was needed"
    assert offload.counts.fetched_ahead > 2
    assert (transfers.held, transfers.on_their_way) == (0, 0)
    assert_same(gradients(model), wanted)
    assert (transfers.held, transfers.on_their_way) == (0, 0)
    offload.detach()


def test_slices_are_offloaded_at_any_batch_size() -> None:
    # Flux's single blocks get slices of a concatenation, which are dense at batch 1 only.
    stored = []
    for batch in (1, 2):
        model = flux()
        given = {k: v[:batch] if len(v) == 2 else v for k, v in inputs(model).items()}
        with ActivationOffload(smallest=0, transfers=RecordingTransfers()).attach(model) as offload:
            model(**given, return_dict=False)[0].float().pow(2).mean().backward()
        stored.append(offload.counts.stored)
    assert stored[0] == stored[1]


def test_expanded_tensors_are_not_offloaded() -> None:
    transfers = RecordingTransfers()
    offload = ActivationOffload(smallest=0, transfers=transfers)
    x = torch.nn.Linear(4, 4)(torch.ones(1, 4))
    for block in [torch.nn.Linear(4, 4) for _ in range(3)]:
        offload.checkpoint(block, x.expand(64, 4))
    assert transfers.events == []


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5, 2**18),
        torch.randn(3, 5, 2**18).transpose(0, 1),
        torch.randn(3, 5, 2**18)[:, 2:],
        torch.randn(2, 3, 5, 2**17)[:, :, 1:],
        torch.randn(3, 5, 4)[:, 2:],
    ],
)
def test_copies_consist_of_whole_contiguous_pieces(tensor: torch.Tensor) -> None:
    host = torch.empty(tensor.numel()).as_strided(tensor.shape, stored_strides(tensor))
    pieces = list(_dense_parts(host, tensor))
    assert len(pieces) <= 6
    for target, source in pieces:
        whole = torch.ops.aten.is_non_overlapping_and_dense.default(source)
        assert whole or source.nbytes < 2**20, "copied through memory of the device"
        assert target.stride() == stored_strides(source)
        target.copy_(source)
    assert torch.equal(host, tensor)


class Chain(torch.nn.Module):
    """A sequence of blocks, so that the tests can list the order of events."""

    _supports_gradient_checkpointing = True

    def __init__(self, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(4, 4)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(blocks))
        self.gradient_checkpointing = False

    def enable_gradient_checkpointing(self, gradient_checkpointing_func: Any = None) -> None:
        self.gradient_checkpointing = True
        self._gradient_checkpointing_func = gradient_checkpointing_func

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = (
                self._gradient_checkpointing_func(block, x)
                if self.gradient_checkpointing
                else block(x)
            )
        return x


def test_each_block_is_offloaded_after_the_next_and_fetched_one_block_ahead() -> None:
    model, transfers = Chain(5), RecordingTransfers()
    ActivationOffload(smallest=0, transfers=transfers).attach(model)
    output = model(torch.ones(1, 4)).sum()
    # Inputs 0 to 4: the last is not stored, and the one before it is needed before it has left.
    assert transfers.events == [
        ("store", 0),
        ("store", 1),
        ("settle", 0),
        ("store", 2),
        ("settle", 1),
        ("store", 3),
        ("settle", 2),
    ]
    transfers.events.clear()
    output.backward()
    assert transfers.events == [
        ("load", 2),
        ("finish", 2),
        ("load", 1),
        ("finish", 1),
        ("load", 0),
        ("finish", 0),
    ]


def test_a_graph_can_be_walked_twice_and_dropped() -> None:
    model, transfers = Chain(6), RecordingTransfers()
    x = torch.ones(1, 4)
    model(x).sum().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    ActivationOffload(smallest=0, transfers=transfers).attach(model)
    model.zero_grad()
    output = model(x).sum()
    output.backward(retain_graph=True)
    output.backward()
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert torch.equal(parameter.grad, 2 * gradient)
    del output
    model(x).sum()
    gc.collect()
    assert (transfers.held, transfers.on_their_way) == (0, 0)


@pytest.mark.parametrize("transfers", [None, "recording"])
def test_inputs_changed_in_place_are_refused(transfers: Any) -> None:
    blocks = [torch.nn.Linear(4, 4) for _ in range(4)]
    offload = ActivationOffload(smallest=0, transfers=RecordingTransfers() if transfers else None)
    x = torch.nn.Linear(4, 4)(torch.ones(1, 4))
    spoiled = x
    for block in blocks:
        x = offload.checkpoint(block, x)
    if transfers is None:
        spoiled.data.add_(0)
        torch.autograd.graph.increment_version(spoiled)
        with pytest.raises(TrainingError, match="the input of a checkpointed block in place"):
            x.sum().backward()
    else:
        torch.autograd.graph.increment_version(x)
        y = offload.checkpoint(blocks[0], x)
        torch.autograd.graph.increment_version(x)
        with pytest.raises(TrainingError, match="the input of a checkpointed block in place"):
            offload.checkpoint(blocks[1], y)


def test_tensors_shared_by_all_blocks_stay_on_the_device() -> None:
    model, transfers = text_unet(), RecordingTransfers()
    offload = ActivationOffload(smallest=2 * 8 * 8 * 8 * 4, transfers=transfers).attach(model)
    gradients(model)
    sizes = offload.counts.stored_bytes / offload.counts.stored
    assert sizes >= 2 * 8 * 8 * 8 * 4, "time embeddings and text are smaller"


def test_on_the_cpu_nothing_is_copied_and_a_decision_says_so() -> None:
    model = text_unet()
    model.enable_gradient_checkpointing()
    wanted = gradients(model)
    offload = ActivationOffload(smallest=0).attach(model)
    assert offload.decisions == ()
    assert_same(gradients(model), wanted)
    (decision,) = offload.decisions
    assert decision.after == "device"
    assert isinstance(offload._transfers, KeptTransfers)
    assert offload.counts.fetched_ahead > 2


@pytest.mark.parametrize("enabled", [False, True])
def test_detaching_restores_everything(enabled: bool) -> None:
    model = text_unet()
    if enabled:
        model.enable_gradient_checkpointing()
    before = [(vars(m).get("gradient_checkpointing"), vars(m).get("_gradient_checkpointing_func"))
              for m in model.modules()]  # fmt: skip
    with ActivationOffload().attach(model) as offload:
        assert offload.attached
        assert model.is_gradient_checkpointing
    assert not offload.attached
    after = [(vars(m).get("gradient_checkpointing"), vars(m).get("_gradient_checkpointing_func"))
             for m in model.modules()]  # fmt: skip
    assert after == before


def test_models_without_checkpointing_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="gradient checkpointing"):
        ActivationOffload().attach(torch.nn.Linear(2, 2))
    offload = ActivationOffload().attach(Chain(2))
    with pytest.raises(InvalidValueError, match="already attached"):
        offload.attach(Chain(2))
    with pytest.raises(InvalidValueError, match="ahead"):
        ActivationOffload(ahead=0)


def test_without_gradients_nothing_is_offloaded() -> None:
    model, transfers = Chain(3), RecordingTransfers()
    ActivationOffload(smallest=0, transfers=transfers).attach(model)
    with torch.no_grad():
        model(torch.ones(1, 4))
    assert transfers.events == []


def test_pooled_blocks_are_reused_and_freed_for_other_sizes() -> None:
    pool = BlockPool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    first, second = pool.take(100), pool.take(100)
    pool.give(first)
    assert pool.take(100) is first
    pool.give(first)
    pool.give(second)
    assert pool.held == pool.peak == 200
    other = pool.take(150)
    assert other.nbytes == 150
    assert pool.held <= pool.peak == 200, "blocks of the other size made room"


def losses(case: Case, offloaded: bool) -> tuple[list[float], bool, int]:
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1,
        block_out_channels=(8, 16), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), norm_num_groups=4, attention_head_dim=8,
        num_class_embeds=11,
    )  # fmt: skip
    model.enable_gradient_checkpointing()
    engine = start(case, model)
    transfers = RecordingTransfers()
    offload = ActivationOffload(smallest=0, transfers=transfers)
    if offloaded:
        offload.attach(engine.module)
    partitioned = all(p.numel() == 0 for p in engine.module.parameters())
    found = []
    for step in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.stage == 2):
            loss = unet_loss(engine, step)
        found.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    engine.close()
    return found, partitioned, offload.counts.fetched_ahead


def with_and_without(case: Case) -> Any:
    return losses(case, False), losses(case, True)


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    "case",
    [
        *nightly(Case(stage=2, offload="cpu")),
        Case(
            stage=3,
            precision="bf16",
            overrides=(("stage3_param_persistence_threshold", 0),),
        ),
    ],
    ids=str,
)
def test_engines_train_bit_for_bit_the_same(case: Case) -> None:
    (((wanted, partitioned, none), (found, _, fetched)),) = run_ranks(with_and_without, case)
    assert found == wanted
    assert partitioned is (case.stage == 3)
    assert none == 0
    assert fetched > 0


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Use deterministic kernels where the device has them."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
# torch warns of operators without a deterministic kernel, which differ between releases.
@pytest.mark.filterwarnings("ignore:.*determinis")
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("make", [text_unet, flux])
def test_a_gpu_gives_the_same_gradients_in_less_memory(make: Any) -> None:
    model = make().cuda()
    model.enable_gradient_checkpointing()

    def measured() -> Any:
        moved = {name: value.cuda() for name, value in inputs(model, 256).items()}
        model.zero_grad(set_to_none=False)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = model(**moved, return_dict=False)[0].float().pow(2).mean()
        loss.backward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        return peak, (loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()})

    measured()
    plain, wanted = measured()
    transfers = StreamTransfers(torch.device("cuda"))
    ActivationOffload(smallest=0, transfers=transfers).attach(model)
    for _ in range(3):
        less, found = measured()
        for name, gradient in found[1].items():
            torch.testing.assert_close(gradient, wanted[1][name], rtol=1e-5, atol=1e-6, msg=name)
    if make is text_unet:
        assert less < plain
    assert transfers.pool.in_use == 0
