"""From a model and a plan to a running engine, in one call."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from zerotune.backend.checks import check_same_plan
from zerotune.backend.compilation import Compilation, Compiled
from zerotune.backend.deepspeed.engine import DeepSpeedEngine
from zerotune.backend.distributed import Launch, ProcessGroup, communication_backend
from zerotune.backend.plain import PlainEngine
from zerotune.backend.stream.engine import StreamEngine, require_other_engine, why_not_streamed
from zerotune.backend.stream.ranks import SharedStreamEngine, why_not_together
from zerotune.backend.trained_parts import TrainedParts
from zerotune.decisions import announce
from zerotune.diffusion.data import (
    BatchStream,
    BucketedDataset,
    BucketStream,
    DataStream,
    ImageSource,
    ImageTensors,
    RepeatedBatches,
)
from zerotune.diffusion.models.family import Unconditional
from zerotune.diffusion.pretrained import Pretrained
from zerotune.errors import DataError, InvalidValueError
from zerotune.offload import OffloadManager
from zerotune.optim import OptimizerResolver
from zerotune.plan.advise import Advice
from zerotune.plan.model import DeepSpeedPlan, ModelFacts, ResolvedPlan, RunFacts
from zerotune.platform import Platform, detect_platform
from zerotune.training.memory import Situation, advising

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine


PlanSource: TypeAlias = (
    "DeepSpeedPlan | ResolvedPlan | Advice | Mapping[str, Any] | str | os.PathLike[str]"
)
"""What a plan may be given as: itself, advice, a configuration, or the path of one."""


def prepare(
    *,
    model: torch.nn.Module | Pretrained,
    plan: PlanSource | None = None,
    resolver: OptimizerResolver | None = None,
    offload: OffloadManager | None = None,
    run: RunFacts | None = None,
    platform: Platform | None = None,
    deepspeed: bool = True,
    compile: bool | Mapping[str, Any] | Compilation = False,  # noqa: A002
    timeout_s: float = 600.0,
    **unknown: Any,
) -> Engine:
    """Resolve a plan for this machine and start the engine it asks for.

    The engine owns what it needs: closing it releases its swap folder and, if it was started
    here, the process group::

        with zerotune.prepare(model=model, plan=plan) as engine:
            loss = objective(engine, batch, generator)
            engine.backward(loss)
            engine.step()

    Under a launcher (``torchrun``, ``accelerate launch``, ``deepspeed``) every process calls it;
    a bare ``python`` needs no environment.

    Args:
        model: The model, in fp32, or what ``load_pretrained`` gave.
        plan: What is wanted: a plan, a DeepSpeed configuration as a dict, or the path of one; a
            ``ResolvedPlan`` is taken as it is. That of ``load_pretrained`` when not given.
        resolver: Settles optimizer and schedule; ``OptimizerResolver()`` when not given. Not
            asked when a resolved plan has them settled.
        offload: Leases swap folders; ``OffloadManager()`` when not given.
        run: What the script knows and the plan may leave ``"auto"``.
        platform: The machine; detected when not given.
        deepspeed: ``False`` asks for the plain engine.
        compile: ``True``, or options of ``Compilation``, compiles the forward pass.
        timeout_s: Seconds after which a collective gives up.
        **unknown: Refused; an optimizer is named in the plan.

    Returns:
        The engine, verified against the plan, which it holds as ``engine.plan``.

    Raises:
        PlanError: The plan cannot run like this.
        OptimizerError: The optimizer cannot be had.
        OffloadError: A swap folder cannot be leased, or the plan needs more host memory than
            there is.
        EngineError: The engine could not be started, or is not what the plan says.
        OutOfMemoryError: Memory ran out; the message names the plan that fits.
    """
    refuse_unknown(unknown, "prepare")
    wanted = None if compile is False else Compilation.of(compile)
    if isinstance(model, Pretrained):
        plan = model.plan if plan is None else plan
        model = model.model
    check_model(model)
    check_resolver(resolver)
    check_kind(
        offload,
        OffloadManager,
        key="offload",
        write="OffloadManager(); what is offloaded stands in the plan: "
        'DeepSpeedPlan.build(offload="cpu")',
    )
    check_kind(run, RunFacts, key="run", write="RunFacts(…), or leave it out")
    check_kind(platform, Platform, key="platform", write="zerotune.detect_platform()")
    plan = as_plan(plan)
    plan = settled(
        plan, model=model, resolver=resolver, run=run, platform=platform, deepspeed=deepspeed
    )
    with ExitStack() as resources:
        compiled = None if wanted is None else Compiled(wanted, model=model, plan=plan)
        if compiled is not None:
            resources.callback(compiled.undo)
        plan = leased(plan, offload or OffloadManager(), resources, timeout_s)
        starting = Situation(plan=plan, doing="starting the engine")
        with advising(lambda: starting):
            engine = build_engine(model=model, plan=plan, timeout_s=timeout_s)
        if compiled is not None:
            compiled.apply(engine)
        engine.resources.push(resources.pop_all())
    return engine


def settled(
    plan: DeepSpeedPlan | ResolvedPlan,
    *,
    model: torch.nn.Module | None,
    resolver: OptimizerResolver | None = None,
    run: RunFacts | None = None,
    platform: Platform | None = None,
    deepspeed: bool = True,
) -> ResolvedPlan:
    """A plan with nothing left open, for this model, machine and number of processes.

    Without a model its optimizer stays open, and sizes that follow from the model are preliminary.
    """
    if not isinstance(plan, ResolvedPlan):
        plan = plan.resolve(
            platform=platform or detect_platform(),
            model=None if model is None else ModelFacts.from_module(model),
            world_size=_processes()[1],
            run=run,
            deepspeed=deepspeed,
        )
    if plan.optimizer or model is None:
        return plan
    return (resolver or OptimizerResolver()).apply(plan)


def _processes() -> tuple[int, int]:
    """Rank and number of the processes, whether they have met yet or not."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    launch = Launch.from_environment()
    return launch.rank, launch.world_size


def leased(
    plan: ResolvedPlan, offload: OffloadManager, resources: ExitStack, timeout_s: float
) -> ResolvedPlan:
    """The plan inside this run's own swap folders; what holds them goes into ``resources``."""
    if not plan.nvme_paths:
        # No folder is made, and no other rank asked: only the host memory is looked at.
        return resources.enter_context(offload.lease(plan, rank=_processes()[0])).plan
    if plan.world_size == 1:
        return resources.enter_context(offload.lease(plan)).plan
    # The ranks must share the folder's name before there is an engine; the engine joins this
    # group and leaves it open for the barrier after which the folder is removed.
    group = ProcessGroup(
        backend=communication_backend(plan.platform.accelerator), timeout_s=timeout_s
    )
    resources.callback(group.close)
    # The lease would tell the ranks that differ from rank 0, but not rank 0.
    check_same_plan(plan, group)
    lease = offload.lease(
        plan,
        rank=group.rank,
        # A foreign trainer may have ended the group by now; the folder's locks then decide.
        barrier=lambda: group.barrier("leaving the swap folder") if dist.is_initialized() else None,
        share=group.broadcast,
    )
    return resources.enter_context(lease).plan


# -- From a resolved plan to the engine it asks for.


def build_engine(*, model: torch.nn.Module, plan: ResolvedPlan, timeout_s: float = 600.0) -> Engine:
    """Start training's engine and verify that it is what the plan says.

    Args:
        model: The model, in fp32.
        plan: A resolved plan with its optimizer chosen.
        timeout_s: Seconds after which a collective gives up.

    Returns:
        A ``DeepSpeedEngine``; a ``StreamEngine`` where weights are streamed, on several ranks a
        ``SharedStreamEngine``; or a ``PlainEngine`` when the plan was resolved without DeepSpeed.

    Raises:
        EngineError: The plan cannot be run.
        VerificationError: What runs is not what was asked for.
    """
    kind: type[DeepSpeedEngine | StreamEngine | PlainEngine]
    kind = DeepSpeedEngine if plan.uses_deepspeed else PlainEngine
    if plan.uses_deepspeed and plan.streamed is not False:
        obstacle = why_not_streamed(plan, model)
        # A device that waits for steps that a host keeps.
        might = plan.platform.accelerator != "cpu" and plan.offload_optimizer == "cpu"
        if plan.streamed and plan.world_size > 1:
            obstacle = why_not_together(plan, model, obstacle=obstacle, timeout_s=timeout_s)
        if obstacle is None:
            kind = StreamEngine if plan.world_size == 1 else SharedStreamEngine
        elif plan.streamed or might:
            plan = plan.without_streaming(obstacle)
            announce(plan.decisions[-1:])
    if kind not in (StreamEngine, SharedStreamEngine):
        require_other_engine(plan)
    return kind(model=model, plan=plan, timeout_s=timeout_s)


# -- What people give to ``Trainer`` and ``prepare``, taken or answered before anything starts.


def as_plan(plan: Any) -> DeepSpeedPlan | ResolvedPlan:
    """Convert a plan, a configuration or the path of one into a plan."""
    if isinstance(plan, DeepSpeedPlan | ResolvedPlan):
        return plan
    if isinstance(plan, Advice):
        return plan.plan
    if isinstance(plan, str | os.PathLike):
        return DeepSpeedPlan.load(plan)
    if isinstance(plan, Mapping):
        return DeepSpeedPlan.from_dict(plan)
    raise InvalidValueError(
        "is no plan",
        key="plan",
        value=plan,
        fix="give a DeepSpeedPlan, a DeepSpeed configuration as a dict, or the path of its file",
    )


def check_model(model: Any) -> None:
    """Whether this is a module that can be trained."""
    if isinstance(model, torch.nn.Module):
        return
    value: Any = model if isinstance(model, str | os.PathLike) else type(model).__name__
    if isinstance(model, str | os.PathLike):
        why = "is where a model lies, not a model"
        fix = f"load it: loaded = zerotune.load_pretrained({os.fspath(model)!r}), then loaded.model"
    elif hasattr(model, "components") or hasattr(model, "save_pretrained"):
        why = "is a whole pipeline; one of its models is trained"
        fix = "zerotune.load_pretrained(FOLDER) gives model and objective, or give pipeline.unet "
        fix += "(or pipeline.transformer)"
    else:
        why, fix = "is no torch.nn.Module", "give the module that is to be trained"
    raise InvalidValueError(why, key="model", value=value, fix=fix)


def check_objective(objective: Any, model: torch.nn.Module) -> None:
    """Whether an objective without conditioning meets a model that can do without it.

    Args:
        objective: ``None`` is the default, which has none.
        model: What it will call.
    """
    if objective is not None:
        _check_callable(objective)
    if objective is not None and not isinstance(getattr(objective, "family", None), Unconditional):
        return
    called = model.primary if isinstance(model, TrainedParts) else model
    needed = _conditioning_of(called)
    if needed is None:
        return
    labels = needed == "class_labels"
    raise InvalidValueError(
        f"{type(called).__name__} is conditioned on {needed}, and "
        + ("the default objective" if objective is None else "the objective's family")
        + " gives it noisy images alone",
        key="objective",
        value=None if objective is None else type(objective).__name__,
        fix="FlowMatchingObjective(family=ClassConditional())"
        if labels
        else "loaded = zerotune.load_pretrained(FOLDER), then objective=loaded.objective()",
    )


def _check_callable(objective: Any) -> None:
    if callable(objective) and not isinstance(objective, type):
        try:
            inspect.signature(objective).bind("model", "batch", "generator")
        except TypeError as error:
            raise InvalidValueError(
                f"is called with model, batch and generator, and does not take them ({error})",
                key="objective",
                value=getattr(objective, "__name__", type(objective).__name__),
                fix="write def objective(model, batch, generator): … return loss",
            ) from error
        except ValueError:  # Some callables of C tell no signature.
            pass
        return
    raise _no_objective(objective)


def _no_objective(objective: Any) -> InvalidValueError:
    name = objective.__name__ if isinstance(objective, type) else type(objective).__name__
    if isinstance(objective, type):
        why, fix = "is a class", f"make one of it: objective={name}(…)"
    elif hasattr(objective, "config") and hasattr(objective, "step"):
        why = "is a scheduler; an objective gives the loss"
        flow = "Flow" in name
        kind = "FlowMatchingObjective" if flow else "DenoisingObjective"
        fix = f"write objective={kind}(scheduler=…, family=…), or loaded.objective() of "
        fix += "zerotune.load_pretrained(FOLDER), which takes the folder's own scheduler"
    else:
        why = "cannot be called; an objective gives the loss"
        fix = "write FlowMatchingObjective(family=…), DenoisingObjective(family=…), "
        fix += "loaded.objective() of zerotune.load_pretrained(FOLDER), or a function of model, "
        fix += "batch and generator"
    return InvalidValueError(
        why, key="objective", value=objective if isinstance(objective, str) else name, fix=fix
    )


def _conditioning_of(model: torch.nn.Module) -> str | None:
    """What a model needs to be called with besides noisy images and their times."""
    if getattr(model, "class_embedding", None) is not None:
        return "class_labels"
    taken = list(inspect.signature(model.forward).parameters.values())
    # Transformers of SD3 and Flux take texts in the place of times.
    if [each.name for each in taken[1:2]] == ["encoder_hidden_states"]:
        return "encoder_hidden_states"
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required = [
        each.name
        for each in taken[2:]
        if each.kind in named and each.default is inspect.Parameter.empty
    ]
    return ", ".join(required) or None


def check_resolver(resolver: Any, *, key: str = "resolver") -> None:
    """Whether this settles optimizers, rather than being one."""
    if resolver is None or isinstance(resolver, OptimizerResolver):
        return
    kind = resolver if isinstance(resolver, type) else type(resolver)
    if issubclass(kind, torch.optim.Optimizer):
        name = kind.__name__
        why = "the engine builds the optimizer itself, over the weights that ZeRO has partitioned"
    else:
        name = resolver if isinstance(resolver, str) else "AdamW"
        why = "is no OptimizerResolver"
    raise InvalidValueError(
        why,
        key=key,
        value=resolver if isinstance(resolver, str) else kind.__name__,
        fix=f'name it in the plan, DeepSpeedPlan.build(optimizer="{name}", lr=…), or '
        f'resolver=OptimizerResolver(overrides={{"optimizer.type": "{name}", "lr": …}})',
    )


def refuse_unknown(arguments: Mapping[str, Any], call: str) -> None:
    """Refuse arguments that a call does not have.

    Raises:
        InvalidValueError: An optimizer, which is named in the plan.
        TypeError: Any other, as Python says it.
    """
    if isinstance(arguments.get("optimizer"), OptimizerResolver):
        raise InvalidValueError(
            "is a resolver", key="optimizer", value="OptimizerResolver", fix="write resolver=…"
        )
    check_resolver(arguments.get("optimizer"), key="optimizer")
    if arguments:
        raise TypeError(f"{call}() got an unexpected keyword argument {min(arguments)!r}")


def check_kind(value: Any, kind: type, *, key: str, write: str) -> None:
    """Whether an argument that may be left out is an object of the class it is asked for.

    Args:
        value: What was given; ``None``: nothing.
        kind: The class, or a protocol that is checked at run time.
        key: The argument.
        write: What to write in its place.
    """
    if value is None or (isinstance(value, kind) and not isinstance(value, type)):
        return
    raise InvalidValueError(
        "is a class" if isinstance(value, type) else f"is no {kind.__name__}",
        key=key,
        value=value.__name__ if isinstance(value, type) else value,
        fix=f"write {key}={write}",
    )


# -- Whatever somebody calls data, as endless resumable micro batches.


_IMAGES_AND_LABELS: Final = 2
_IMAGE_BATCH_DIMS: Final = 4


def as_stream(data: Any, *, engine: Engine, seed: int, **loading: Any) -> BatchStream | None:
    """A stream of this rank's micro batches.

    Args:
        data: A ``BatchStream`` is taken as it is. What has ``__len__`` and ``__getitem__`` and is
            no list or tuple is a dataset, shared over the ranks in an order fixed by ``seed``;
            one in buckets, such as ``PreparedImages``, gives batches of one bucket each.
            Any other iterable gives this rank's own batches. ``None`` is no data.
        engine: Tells rank, world size and micro batch size.
        seed: Fixes the order.
        loading: ``num_workers`` and ``pin_memory`` of the stream over a dataset.
    """
    if data is None or isinstance(data, BatchStream):
        _check_not_reading(loading, data)
        return data
    if isinstance(data, str | os.PathLike | ImageSource):
        raise _only_photos(data)
    is_dataset = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if is_dataset and not isinstance(data, list | tuple):
        if not isinstance(data, BucketedDataset):
            data = samples_by_name(data)
        stream = BucketStream if isinstance(data, BucketedDataset) else DataStream
        return stream(
            data,
            micro_batch_size=engine.plan.micro_batch_size,
            seed=seed,
            rank=engine.group.rank,
            world_size=engine.group.world_size,
            **loading,
        )
    if isinstance(data, Iterable):
        _check_not_reading(loading, data)
        return RepeatedBatches(data)
    raise DataError(
        "is neither a dataset nor an iterable of batches",
        key="data",
        value=type(data).__name__,
        fix="give something with __len__ and __getitem__, or a DataLoader",
    )


def _check_not_reading(loading: Mapping[str, Any], data: Any) -> None:
    if loading:
        raise InvalidValueError(
            "are of a dataset; who makes batches has said how they are read",
            key="workers, pin",
            value=type(data).__name__,
            fix="give the dataset, or num_workers and pin_memory to the loader or stream",
        )


def _only_photos(data: Any) -> DataError:
    """The error for images that nothing has brought to a size yet."""
    path = isinstance(data, str | os.PathLike)
    source = f"ImageFolder({os.fspath(data)!r})" if path else type(data).__name__ + "(…)"
    return DataError(
        "is where images lie, not a dataset"
        if path
        else "are images of any size, which no batch can be made of",
        key="data",
        value=data if path else type(data).__name__,
        fix=f"data=PreparedImages({source}, buckets=AspectBuckets(area=1024 * 1024)), or "
        "encode_dataset of that, which computes latents and text embeddings once",
    )


def samples_by_name(data: Any) -> Any:
    """A dataset of dicts: this one, or what a ``TensorDataset`` of images and labels holds."""
    if isinstance(data, TensorDataset) and len(data.tensors) <= _IMAGES_AND_LABELS:
        images, *labels = data.tensors
        if images.ndim == _IMAGE_BATCH_DIMS and images.is_floating_point():
            return ImageTensors(images=images, labels=labels[0] if labels else None)
    if len(data):
        check_named(data[0], key="data[0]")
    return data


def check_named(batch: Any, *, key: str) -> None:
    """Whether a sample or batch is a dict that a step can work with."""
    if isinstance(batch, Mapping):
        odd = {
            name: type(value).__name__
            for name, value in batch.items()
            if value is None or isinstance(value, str | bytes) or _is_picture(value)
        }
        if odd:
            raise DataError(
                "no tensors can be made of these",
                key=key,
                value=odd,
                fix="encode them before (zerotune.encode_dataset, or PreparedImages over "
                'DatasetImages(dataset, image="image", caption="text")), or leave them out',
            )
        return
    kinds = [type(each).__name__ for each in batch] if isinstance(batch, list | tuple) else []
    raise DataError(
        "samples and batches are dicts of tensors by name",
        key=key,
        value=f"{type(batch).__name__} of {', '.join(kinds)}" if kinds else type(batch).__name__,
        fix=_dict_instead(batch),
    )


def _is_picture(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "PIL"


def _dict_instead(batch: Any) -> str:
    pair = isinstance(batch, list | tuple) and len(batch) > 0
    if _is_picture(batch[0] if pair else batch):
        take = (
            "image=0, caption=lambda _: ''" if pair else "image=lambda s: s, caption=lambda _: ''"
        )
        return f"PreparedImages over DatasetImages(dataset, {take}); see the page on data"
    if pair:
        return (
            'return {"images": …, "labels": …} with images (c, h, w) in [-1, 1], or give '
            "ImageTensors(images=…, labels=…)"
        )
    return 'return {"images": …}, images (c, h, w) in [-1, 1], or give ImageTensors(images=…)'
