"""Run the checks of a ``Proof``: compare fast code paths with plain code on small models.

On a device, random delays are queued on its streams, so that a missing synchronisation changes the
result. Without a device, streams are recorded, and the checks verify that each memory access is
ordered after the accesses that it depends on.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Final
from unittest import mock

import attrs
import torch
from torch.utils.checkpoint import checkpoint

from zerotune._util.proc import environment
from zerotune.backend.ops import build_op
from zerotune.backend.proof import COMMAND, VARIABLE, Combination, Outcome, Proof, describe_error
from zerotune.backend.step.adams import SlabStep, torch_rounds_alike
from zerotune.backend.step.kernel import load_host_step
from zerotune.backend.step.pending import Piece, StreamUpload, Upload
from zerotune.backend.stream.lanes import Lane
from zerotune.backend.stream.passes import UnitPass
from zerotune.backend.streams import Recorder
from zerotune.backend.upstream import require_accelerate, require_deepspeed
from zerotune.diffusion.activations import ActivationOffload, StreamTransfers
from zerotune.ema import EMAShadow
from zerotune.errors import ZeroTuneError
from zerotune.optim import OptimizerResolver
from zerotune.plan.model import DeepSpeedPlan, ModelFacts, Streaming
from zerotune.plan.resolve import pins_natively
from zerotune.platform import Platform, detect_platform
from zerotune.platform.facts import DEEPSPEED_NAMES
from zerotune.training.setup import build_engine

SECONDS: Final = 30.0
_PLAIN_ENGINE: Final = 0
"""Used instead of a stage number for the plain engine."""
_FEATURES: Final = 512
"""Features of a layer whose weights fill one part of a step."""
_CHAIN_LAYERS: Final = 6
_STEPS_TAKEN: Final = 5
_ROUNDS: Final = 40
_ELEMENTS: Final = 2**16
_DELAY: Final = 2**22
"""Elements of the operation that delays a stream."""
_RANKS: Final = 2
_RANKS_S: Final = 150.0
"""Timeout in seconds for two processes to import and run their steps."""


class DifferenceError(Exception):
    """The fast path's result differs from the plain path's result."""


class NotRunError(Exception):
    """The check does not apply to this machine."""


# -- Where checks run.


class DelayedStreams:
    """Wraps a device's streams, and delays queued work at random."""

    def __init__(self, device: torch.device, chance: random.Random) -> None:
        self._module: Any = torch.get_device_module(device)
        self._chance = chance
        # Not a matrix product: with several streams, cuBLAS computes different bits.
        self._work = torch.ones(_DELAY, device=device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """Queue the block's work on a stream, after a random delay."""
        with self._module.stream(stream):
            self.delay()
            yield

    def delay(self) -> None:
        """Queue work of random duration on the current stream."""
        for _ in range(self._chance.randrange(20) if self._chance.random() < 0.3 else 0):
            self._work.mul_(1.0)


@attrs.frozen(kw_only=True)
class Run:
    """Settings for training a small model for a few steps."""

    stage: int
    hidden: bool
    host_step: bool = True
    clipping: float = 0.5
    streamed: bool = False

    def __str__(self) -> str:
        return "the plain engine" if self.stage == _PLAIN_ENGINE else f"stage {self.stage}"


@attrs.frozen(kw_only=True)
class Bench:
    """Devices, streams and cached results for the checks."""

    platform: Platform
    device: torch.device
    chance: random.Random
    recorder: Recorder | None
    """Recorder that replaces the device's streams; ``None`` on a device."""
    streams: Any
    """Streams of the device, or the recorder."""
    left: dict[Run, dict[str, str]] = attrs.field(factory=dict)
    """Cached results of each run; several checks share them."""

    @classmethod
    def on(cls, platform: Platform, *, recorded: bool) -> Bench:
        """Create a bench on this process's accelerator, or on the CPU with recorded streams.

        Args:
            platform: This machine.
            recorded: Use the CPU and record streams, even if the machine has an accelerator.
        """
        chance = random.Random(0)  # noqa: S311 - lengths of delays
        if recorded or platform.accelerator == "cpu":
            recorder = Recorder(simulated=True)
            device = torch.device("cpu")
            return cls(
                platform=platform, device=device, chance=chance, recorder=recorder, streams=recorder
            )
        module: Any = torch.get_device_module(DEEPSPEED_NAMES[platform.accelerator])
        kind = DEEPSPEED_NAMES[platform.accelerator]
        device = torch.device(kind, module.current_device())
        streams = DelayedStreams(device, chance)
        return cls(platform=platform, device=device, chance=chance, recorder=None, streams=streams)

    def delay(self) -> None:
        """Delay host and device at random."""
        if self.chance.random() < 0.2:
            time.sleep(self.chance.random() * 1e-3)
        if self.recorder is None:
            self.streams.delay()

    @contextmanager
    def judged(self) -> Iterator[None]:
        """If streams are recorded, check the order of the memory accesses in the block."""
        if self.recorder is None:
            yield
            return
        self.recorder.faults.clear()
        with self.recorder, self.recorder.page_locking():
            yield
        if self.recorder.faults:
            raise DifferenceError(self.recorder.faults[0])

    def prove_rounding(self) -> None:
        """Check that device, host and the op ``host_step`` round fp32 to bf16 identically."""
        high = torch.arange(2**16, dtype=torch.int32).mul_(2**16)
        low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
        wide = (high[:, None] + low).view(-1).view(torch.float32)
        wide = wide[wide.isfinite()]
        rounded = wide.bfloat16()
        if not torch.equal(
            wide.to(self.device).bfloat16().cpu().view(torch.int16), rounded.view(torch.int16)
        ):
            raise DifferenceError(
                f"{self.device.type} rounds fp32 to bf16 differently from the host"
            )
        if not torch_rounds_alike(load_host_step()):
            raise DifferenceError("torch rounds differently from the op host_step")

    def prove_page_locked(self) -> None:
        """Check that asynchronous copies through page-locked memory transfer all data."""
        self._copies(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))

    def prove_native_page_locking(self) -> None:
        """Check that copies through DeepSpeed's own page-locked memory transfer all data."""
        if not pins_natively(self.platform):
            raise NotRunError(
                "the check is not needed, because DeepSpeed does not page-lock memory itself on "
                "this machine"
            )
        accelerator = require_deepspeed(
            accelerator=DEEPSPEED_NAMES[self.platform.accelerator]
        ).accelerator.get_accelerator()
        with environment(DS_PIN_MEMORY_BACKEND="native"):
            self._copies(lambda n: accelerator.pin_memory(torch.zeros(n, dtype=torch.uint8)))

    def _copies(self, allocate: Callable[[int], torch.Tensor]) -> None:
        with self.judged():
            side, wrong = self.streams.Stream(), torch.zeros((), device=self.device)
            blocks = [allocate(_ELEMENTS), allocate(_ELEMENTS)]
            for step in range(_ROUNDS):
                source = torch.full((_ELEMENTS,), step % 251, dtype=torch.uint8, device=self.device)
                block = blocks[step % 2]
                side.wait_stream(self.streams.current_stream())
                with self.streams.stream(side):
                    block.copy_(source, non_blocking=True)
                event = side.record_event()
                event.synchronize()
                if int(block.min()) != step % 251 or int(block.max()) != step % 251:
                    raise DifferenceError(
                        f"round {step}: a copy to the host differs from its source"
                    )
                back = torch.zeros(_ELEMENTS, dtype=torch.uint8, device=self.device)
                side.wait_stream(self.streams.current_stream())
                with self.streams.stream(side):
                    back.copy_(block, non_blocking=True)
                self.streams.current_stream().wait_event(side.record_event())
                wrong += (back != source).sum()
                del source, back
            if int(wrong):
                raise DifferenceError(f"{int(wrong)} bytes copied back differ from their source")

    def prove_uploads(self) -> None:
        """Check that uploaded weights arrive before use, and do not overwrite weights in use."""
        lengths, numbers = range(0, _ELEMENTS, _ELEMENTS // 4), torch.arange(_ELEMENTS).float()
        if self.recorder is not None:
            self.recorder.lie("pageable", numbers)
        with self.judged():
            targets = [torch.zeros(_ELEMENTS, device=self.device) for _ in range(2)]
            sources = [torch.zeros(_ELEMENTS, pin_memory=True) for _ in range(2)]
            upload = StreamUpload(
                targets=targets,
                sources=sources,
                stream=self.streams.Stream(),
                accelerator=self.streams,
            )
            wrong = torch.zeros((), device=self.device)
            ramp = torch.arange(_ELEMENTS, device=self.device).float()
            for step in range(_ROUNDS):
                upload.begin()
                sent = []
                for start in self.chance.sample(lengths, len(lengths)):
                    stop = start + _ELEMENTS // 4
                    pieces = [Piece(slab=slab, start=start, stop=stop) for slab in range(2)]
                    for piece in pieces:
                        part = slice(piece.start, piece.stop)
                        torch.add(numbers[part], step + piece.slab, out=sources[piece.slab][part])
                    sent.append(upload.send(pieces))
                    self.delay()
                for each in sent:
                    upload.receive(each)
                self.delay()
                for slab, target in enumerate(targets):
                    wrong += (target != ramp + (step + slab)).sum()
            if int(wrong):
                raise DifferenceError(
                    f"{int(wrong)} weights in {_ROUNDS} steps arrived too late or too early"
                )

    def prove_activations(self) -> None:
        """Check that activation offload does not change the gradients."""
        model = _Chain(width=64).to(self.device)
        if self.recorder is not None:
            self.recorder.lie("device", *model.parameters())
        transfers = StreamTransfers(self.device, streams=self.streams)
        offload = ActivationOffload(smallest=1, transfers=transfers)

        def kept(block: torch.nn.Module, x: torch.Tensor) -> Any:
            return checkpoint(block, x, use_reentrant=False)

        wanted = [self.chain_gradients(model, kept, step) for step in range(_STEPS_TAKEN)]
        with self.judged():
            offloaded = [
                self.chain_gradients(model, offload.checkpoint, step)
                for step in range(_STEPS_TAKEN)
            ]
        if not offload.counts.stored:
            raise DifferenceError("no activation was offloaded")
        for step, (mine, theirs) in enumerate(zip(offloaded, wanted, strict=True)):
            for name in theirs:
                if not torch.equal(mine[name], theirs[name]):
                    raise DifferenceError(
                        f"step {step}: {name} differs from its value without offload"
                    )

    def chain_gradients(
        self, model: _Chain, run: Callable[..., Any], step: int
    ) -> dict[str, torch.Tensor]:
        """Return the loss and the gradients of a small model.

        Args:
            model: The model.
            run: Function that is called with each block of the model and its input.
            step: Seed of the input.
        """
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(32, 64, generator=generator).to(self.device).requires_grad_()
        if self.recorder is not None:
            self.recorder.lie("device", x)
        model.zero_grad(set_to_none=True)
        for layer in model.layers:
            self.delay()
            x = run(layer, x)
        loss = x.square().mean()
        torch.autograd.backward(loss)
        return {"the loss": loss.detach(), **{
            f"the gradient of {name}": parameter.grad.clone()
            for name, parameter in model.named_parameters() if parameter.grad is not None
        }}  # fmt: skip

    def left_by(self, run: Run) -> dict[str, str]:
        """Return a run's results by name: losses, and digests of weights, moments and EMAs."""
        if run not in self.left:
            self.left[run] = self.take(run)
        return self.left[run]

    def take(self, run: Run) -> dict[str, str]:
        """Train with the settings in ``run``, and return results in the format of ``left_by``."""
        model = _Chain()
        engine = self._small_engine(model, run)
        ema = EMAShadow(decay=0.9).attach(engine)
        losses: list[torch.Tensor] = []
        try:
            with self._late(model) if run.hidden or run.streamed else nullcontext():
                for step in range(_STEPS_TAKEN):
                    generator = torch.Generator().manual_seed(17 * step + engine.group.rank)
                    x = torch.randn(4, _FEATURES, generator=generator).to(
                        engine.device, engine.dtype
                    )
                    loss = engine(x).float().square().mean()
                    losses.append(loss.detach())
                    ema.expect_step()
                    engine.backward(loss)
                    engine.step()
                    ema.step()
            if run.streamed and not engine.counts.evicted:
                raise DifferenceError("no weight was offloaded")
            left = {f"loss {step}": float(loss).hex() for step, loss in enumerate(losses)}
            for fragment in engine.master_weights.read():
                left[f"weight {fragment.address.key}"] = _tensor_digest(fragment.value)
                for name, state in sorted(fragment.states.items()):
                    left[f"{name} of {fragment.address.key}"] = _tensor_digest(state)
            for name, value in ema.state_dict().items():
                left[f"average {name}"] = _tensor_digest(value)
            if run.stage < 3:
                for name, parameter in engine.module.named_parameters():
                    left[f"the model's {name}"] = _tensor_digest(parameter.detach())
        finally:
            engine.close()
        return left

    def _small_engine(self, model: torch.nn.Module, run: Run) -> Any:
        platform = self.platform
        overrides: dict[str, Any] = {}
        if run.stage == 3:
            overrides["stage3_param_persistence_threshold"] = _FEATURES
        plan = DeepSpeedPlan.build(
            stage=run.stage or 2,
            offload="cpu",
            precision="bf16" if platform.bf16 else "fp32",
            micro_batch_size=4,
            gradient_clipping=run.clipping,
            optimizer={"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
            **overrides,
        )
        resolved = plan.resolve(
            platform=platform,
            model=ModelFacts.from_module(model),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            deepspeed=run.stage != _PLAIN_ENGINE,
            hidden=run.hidden,
            host_step=run.host_step,
            streamed=run.streamed and Streaming(units=("Sequential",), window=2),
        )
        return build_engine(model=model, plan=OptimizerResolver().apply(resolved), timeout_s=60.0)

    @contextmanager
    def _late(self, model: torch.nn.Module) -> Iterator[None]:
        """Add random delays to the step's updates, copies and uploads, and to the forward pass."""

        def slow(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.delay()
                returned = method(*args, **kwargs)
                self.delay()
                return returned

            return call

        with ExitStack() as stack:
            for module in model.modules():
                stack.callback(module.register_forward_pre_hook(lambda *_: self.delay()).remove)
            stack.enter_context(mock.patch.object(SlabStep, "run", slow(SlabStep.run)))
            stack.enter_context(mock.patch.object(Upload, "send", slow(Upload.send)))
            stack.enter_context(mock.patch.object(UnitPass, "take", slow(UnitPass.take)))
            queue = Lane._queue

            def queue_late(lane: Lane, copy: Callable[[], None], ready: Any) -> Any:
                def late() -> None:
                    self.delay()  # on the lane's own stream too
                    copy()

                return queue(lane, late, ready)

            stack.enter_context(mock.patch.object(Lane, "_queue", queue_late))
            yield

    def compare_steps(self, mine: Mapping[str, bool], theirs: Mapping[str, bool]) -> None:
        """Check that two settings of the optimizer step give the same results at each ZeRO stage.

        Args:
            mine: Arguments of ``Run`` for the fast path.
            theirs: Arguments of ``Run`` for the plain path.
        """
        stages = (_PLAIN_ENGINE, 2, 3) if self.platform.deepspeed.available else (_PLAIN_ENGINE,)
        for stage in stages:
            first, second = Run(stage=stage, **mine), Run(stage=stage, **theirs)
            _check_equal(self.left_by(first), self.left_by(second), where=str(first))

    def prove_streaming(self) -> None:
        """Check that streamed weights give exactly the results of ZeRO-2 with CPU offload."""
        if not self.platform.deepspeed.available:
            raise NotRunError("DeepSpeed, the reference, does not run on this machine")
        for clipping in (0.5, 0.0):
            run = Run(stage=2, hidden=False, clipping=clipping)
            streamed = attrs.evolve(run, streamed=True)
            where = "streamed, " + ("with clipping" if clipping else "stepped in the backward pass")
            _check_equal(self.left_by(streamed), self.left_by(run), where=where)

    def prove_exchange(self) -> float:
        """Check the exchange of weights between ranks; return the slower rank's time in seconds."""
        if not self.platform.deepspeed.available:
            raise NotRunError("DeepSpeed does not run on this machine")
        if self.platform.accelerator != "cpu" and len(self.platform.devices) < _RANKS:
            raise NotRunError("the machine has only one device")
        answers = _on_ranks(partial(_prove_on_rank, self.platform), _RANKS)
        for rank, (mine, theirs, _) in enumerate(answers):
            _check_equal(mine, theirs, where=f"stage 2, rank {rank}")
        return float(max(seconds for _, _, seconds in answers))


class _Chain(torch.nn.Module):
    """Layers of equal width, with the same initial weights at every call."""

    def __init__(self, *, width: int = _FEATURES) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh())
                for _ in range(_CHAIN_LAYERS)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def _tensor_digest(tensor: torch.Tensor) -> str:
    content = tensor.contiguous().cpu().view(-1).view(torch.uint8)
    return hashlib.sha256(content.numpy().tobytes()).hexdigest()[:16]


def _check_equal(mine: Mapping[str, str], theirs: Mapping[str, str], *, where: str) -> None:
    names = [name for name in {**theirs, **mine} if mine.get(name) != theirs.get(name)]
    if names:
        shown = ", ".join(f"{name}: {mine.get(name)} and {theirs.get(name)}" for name in names)
        raise DifferenceError(f"{where}: {names[0]} and {len(names) - 1} others differ\n{shown}")


# -- Several ranks.


def _prove_on_rank(platform: Platform) -> tuple[dict[str, str], dict[str, str], float]:
    if platform.accelerator != "cpu":
        module: Any = torch.get_device_module(DEEPSPEED_NAMES[platform.accelerator])
        module.set_device(int(os.environ["LOCAL_RANK"]))
    _import(platform)
    bench, began = Bench.on(platform, recorded=False), time.perf_counter()
    mine, theirs = (bench.take(Run(stage=2, hidden=hidden)) for hidden in (True, False))
    return mine, theirs, time.perf_counter() - began


def _on_ranks(function: Callable[[], Any], count: int) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    processes, answers, deadline = [], [], time.monotonic() + _RANKS_S
    try:
        for rank in range(count):
            receive, send = context.Pipe(duplex=False)
            process = context.Process(
                target=_serve, args=(function, rank, count, port, send), daemon=True
            )
            process.start()
            send.close()
            processes.append((process, receive))
        for rank, (_, receive) in enumerate(processes):
            if not receive.poll(max(0.0, deadline - time.monotonic())):
                raise DifferenceError(f"rank {rank} of {count} did not finish")
            answer = receive.recv()
            if isinstance(answer, str):
                raise DifferenceError(f"rank {rank} of {count} failed: {answer}")
            answers.append(answer)
    except EOFError as error:
        raise DifferenceError(f"one of {count} ranks exited") from error
    finally:
        for process, receive in processes:
            process.join(5 if len(answers) == count else 0)
            process.kill()
            receive.close()
    return answers


def _serve(function: Callable[[], Any], rank: int, count: int, port: int, send: Any) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    try:
        send.send(function())
    except Exception as error:  # noqa: BLE001 - said by the process that began this one
        send.send(f"{describe_error(error)}\n{traceback.format_exc()}")
    finally:
        send.close()


# -- All checks.


@attrs.frozen(kw_only=True)
class Check:
    """One check that compares a fast path with the plain path."""

    name: str
    """Name of the fast path in ``zerotune.backend.proof.PATHS``."""
    run: Callable[[Bench], float | None]
    """Function that runs the check; may return the duration to record, in seconds."""
    on_streams: bool = False
    """Whether the check also runs on the CPU with recorded streams."""
    needs_ops: bool = False
    """Whether the check uses compiled ops."""


_hidden_as_taken_at_once: Final = partial(
    Bench.compare_steps, mine={"hidden": True}, theirs={"hidden": False}
)
_one_pass_as_in_a_chain: Final = partial(
    Bench.compare_steps, mine={"hidden": False}, theirs={"hidden": False, "host_step": False}
)

CHECKS: Final[Sequence[Check]] = (
    Check(name="bf16 rounding", run=Bench.prove_rounding, needs_ops=True),
    Check(name="page-locked copies", run=Bench.prove_page_locked, on_streams=True),
    Check(name="native page-locking", run=Bench.prove_native_page_locking),
    Check(name="uploads", run=Bench.prove_uploads, on_streams=True),
    Check(name="activations", run=Bench.prove_activations, on_streams=True),
    Check(name="hidden step", run=_hidden_as_taken_at_once, needs_ops=True),
    Check(name="one pass", run=_one_pass_as_in_a_chain, needs_ops=True),
    Check(name="exchange", run=Bench.prove_exchange, needs_ops=True),
    Check(name="streaming", run=Bench.prove_streaming, needs_ops=True),
)


def prove(*, platform: Platform | None = None, seconds: float = SECONDS) -> Proof:
    """Run every check that this machine supports.

    Args:
        platform: The machine to check; detected by default.
        seconds: Seconds after which no further check starts, not counting imports and compilation.

    Returns:
        The proof; save it with ``store_proof``.
    """
    platform = platform or detect_platform(log=False)
    combination = Combination.here(platform.accelerator)
    missing = _import(platform)
    here = Bench.on(platform, recorded=False)
    # On a device, each check runs with recorded streams on the CPU first.
    benches = (here,) if here.recorder else (Bench.on(platform, recorded=True), here)
    outcomes: dict[str, Outcome] = {}
    for check in CHECKS:
        spent = sum(each.seconds for each in outcomes.values())
        obstacle = missing if check.needs_ops else None
        if spent >= seconds:
            obstacle = (
                f"earlier checks took {spent:.0f} s, so this check did not start; run `{COMMAND}` "
                "again when the machine is less busy"
            )
        outcomes[check.name] = (
            run_check(check, benches) if obstacle is None else Outcome(passed=None, detail=obstacle)
        )
    return Proof(combination=combination, checks=outcomes)


def _import(platform: Platform) -> str | None:
    """Import and compile what engines need; return what is missing, or ``None``."""
    try:
        load_host_step()
        require_accelerate()
        if platform.deepspeed.available:
            require_deepspeed(accelerator=DEEPSPEED_NAMES[platform.accelerator])
            build_op("cpu_adam")
    except ZeroTuneError as error:
        return describe_error(error)
    return None


def run_check(check: Check, benches: Sequence[Bench]) -> Outcome:
    """Run one check, and return its outcome, even if the check raises an error.

    Args:
        check: The check.
        benches: Benches to use, in order; a check without ``on_streams`` runs only on the last
            bench.
    """
    began, counted = time.perf_counter(), None
    passed: bool | None = True
    detail = evidence = ""
    try:
        for bench in benches if check.on_streams else benches[-1:]:
            with _deterministic():
                counted = check.run(bench)
    except NotRunError as reason:
        passed, detail = None, str(reason)
    except DifferenceError as difference:
        passed, (detail, _, evidence) = False, str(difference).partition("\n")
    except Exception as error:  # noqa: BLE001 - a path that fails is not taken, whatever it meets
        passed, detail, evidence = False, describe_error(error), traceback.format_exc()
    return Outcome(
        passed=passed,
        detail=detail,
        evidence=evidence,
        seconds=time.perf_counter() - began if counted is None else counted,
    )


@contextmanager
def _deterministic() -> Iterator[None]:
    """Make the device deterministic, and keep engines from starting their own proof."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with environment(**{"CUBLAS_WORKSPACE_CONFIG": workspace, VARIABLE: "off"}):
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warning)
