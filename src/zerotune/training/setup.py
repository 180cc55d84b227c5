"""Build a running engine from a model and a plan in one call."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset
from typing_extensions import Never

from zerotune.backend.accelerator import accelerator_for
from zerotune.backend.checks import check_same_plan
from zerotune.backend.compilation import Compilation, Compiled
from zerotune.backend.deepspeed.engine import DeepSpeedEngine
from zerotune.backend.distributed import ProcessGroup, rank_and_world_size
from zerotune.backend.host.engine import HostEngine, require_other_engine, why_not_hosted
from zerotune.backend.host.plain import PlainHostEngine, SharedPlainHostEngine
from zerotune.backend.host.ranks import SharedHostEngine, why_not_together
from zerotune.backend.plain import PlainEngine
from zerotune.backend.trained_parts import TrainedParts
from zerotune.decisions import Decision, announce
from zerotune.diffusion.data import BucketStream, DataStream, ImageTensors
from zerotune.diffusion.data.sources import ImageSource
from zerotune.diffusion.data.streams import BatchStream, BucketedDataset, RepeatedBatches
from zerotune.diffusion.models.family import Unconditional
from zerotune.diffusion.pretrained import Pretrained
from zerotune.errors import DataError, EngineError, InvalidValueError
from zerotune.offload import OffloadManager
from zerotune.offload.manager import local_ranks
from zerotune.offload.space import fit_host_memory
from zerotune.optim import OptimizerResolver
from zerotune.plan.context import DeviceUpdate, EngineName, RunFacts, UpdateName
from zerotune.plan.facts import ModelFacts
from zerotune.plan.plan import Advice, DeepSpeedPlan, ResolvedPlan
from zerotune.plan.resolved import host_obstacle
from zerotune.platform import Platform, detect_platform
from zerotune.training.memory import Situation, advising

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine


PlanSource: TypeAlias = (
    "DeepSpeedPlan | ResolvedPlan | Advice | Mapping[str, Any] | str | os.PathLike[str]"
)
"""Accepted types of ``plan``: a plan, advice, a configuration, or the path to one."""


def prepare(
    model: torch.nn.Module | Pretrained,
    plan: PlanSource | None = None,
    *,
    resolver: OptimizerResolver | None = None,
    offload: OffloadManager | None = None,
    run: RunFacts | None = None,
    platform: Platform | None = None,
    deepspeed: bool = True,
    engine: EngineName | None = None,
    update: UpdateName | DeviceUpdate | None = None,
    compile: bool | Mapping[str, Any] | Compilation = False,  # noqa: A002
    timeout_s: float = 600.0,
    **unknown: Never,
) -> Engine:
    """Resolve a plan for this machine and start its engine.

    Closing the engine deletes its swap folder, and ends the process group if ``prepare`` started
    it::

        with zerotune.prepare(model=model, plan=plan) as engine:
            loss = objective(engine, batch, generator)
            engine.backward(loss)
            engine.step()

    Under a launcher (``torchrun``, ``accelerate launch``, ``deepspeed``) every process calls
    ``prepare``. A single process started with ``python`` needs no environment variables.

    Args:
        model: The model in fp32, or the object returned by ``load_pretrained``.
        plan: A plan, a DeepSpeed configuration as a dict, or the path to a configuration file; a
            ``ResolvedPlan`` is used unchanged. Default: the plan passed to ``load_pretrained``.
        resolver: Chooses optimizer and schedule, also for a ``ResolvedPlan``; default
            ``OptimizerResolver()``.
        offload: Creates the swap folders; default ``OffloadManager()``.
        run: Values for the fields that are ``"auto"`` in the plan.
        platform: The machine to run on; detected by default.
        deepspeed: ``False`` trains without DeepSpeed, with a ``PlainEngine``.
        engine: ``"host"`` or ``"deepspeed"``, as in ``DeepSpeedPlan.resolve``; ignored if ``plan``
            is resolved.
        update: Where the host engine updates weights, as in ``DeepSpeedPlan.resolve``; by default
            as advised, and ignored if ``plan`` is resolved.
        compile: Whether to compile the forward pass, or ``Compilation`` options for it.
        timeout_s: Timeout of collectives in seconds.
        **unknown: Rejected with an error; the optimizer belongs in the plan, not in ``optimizer=``.

    Returns:
        The engine; its behaviour is verified against ``engine.plan``.

    Raises:
        PlanError: The plan cannot run on this machine.
        OptimizerError: The optimizer is not available.
        OffloadError: A swap folder cannot be created, or host memory is too small for the plan.
        EngineError: The engine could not be started, or differs from the plan.
        OutOfMemoryError: Memory ran out; the message names a plan that fits.
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
        write="OffloadManager(), and set what to offload in the plan: "
        'DeepSpeedPlan.build(offload="cpu")',
    )
    check_kind(run, RunFacts, key="run", write="RunFacts(…), or omit run")
    check_kind(platform, Platform, key="platform", write="zerotune.detect_platform()")
    plan = as_plan(plan)
    plan = settled(
        plan,
        model=model,
        resolver=resolver,
        run=run,
        platform=platform,
        deepspeed=deepspeed,
        engine=engine,
        update=update,
    )
    plan = _in_training_mode(model, plan)
    with ExitStack() as resources:
        compiled = None if wanted is None else Compiled(wanted, model=model, plan=plan)
        if compiled is not None:
            resources.callback(compiled.undo)
        plan = leased(plan, offload or OffloadManager(), resources, timeout_s)
        starting = Situation(plan=plan, doing="starting the engine")
        with advising(lambda: starting):
            started = build_engine(model=model, plan=plan, timeout_s=timeout_s)
        if compiled is not None:
            compiled.apply(started)
        started.resources.push(resources.pop_all())
    return started


def _in_training_mode(model: torch.nn.Module, plan: ResolvedPlan) -> ResolvedPlan:
    """Put a model in training mode; a decision records it if the model was not."""
    if model.training:
        return plan
    model.train()
    reason = "from_pretrained and eval() turn dropout off; call eval() after prepare to keep that"
    switched = Decision("model", "eval mode", "training mode", reason)
    announce([switched])
    return attrs.evolve(plan, decisions=(*plan.decisions, switched))


def settled(
    plan: DeepSpeedPlan | ResolvedPlan | Advice,
    *,
    model: torch.nn.Module | None,
    resolver: OptimizerResolver | None = None,
    run: RunFacts | None = None,
    platform: Platform | None = None,
    deepspeed: bool = True,
    engine: EngineName | None = None,
    update: UpdateName | DeviceUpdate | None = None,
) -> ResolvedPlan:
    """Resolve a plan for a model, a machine and the number of processes.

    Without a model, values that depend on it are preliminary, and parameter groups are missing.
    """
    if model is None and resolver is not None:
        # Groups are rules for a model's parameters.
        resolver = attrs.evolve(resolver, groups=None)
    if isinstance(plan, ResolvedPlan):
        plan = plan if resolver is None else resolver.apply(plan)
    else:
        plan = (plan.plan if isinstance(plan, Advice) else plan).resolve(
            platform=platform or detect_platform(),
            model=None if model is None else ModelFacts.from_module(model),
            world_size=rank_and_world_size()[1],
            run=run,
            deepspeed=deepspeed,
            streamed=plan.streamed if isinstance(plan, Advice) else None,
            engine=engine,
            update=plan.update if update is None and isinstance(plan, Advice) else update,
            resolver=resolver,
        )
    return plan if model is None else plan.for_run(run)


def leased(
    plan: ResolvedPlan, offload: OffloadManager, resources: ExitStack, timeout_s: float
) -> ResolvedPlan:
    """Create this run's swap folders, and return the plan with their paths.

    Closing ``resources`` deletes the folders.
    """
    if not plan.nvme_paths:
        # This lease only checks host memory: no folder to create, no rank to ask.
        return resources.enter_context(offload.lease(plan, rank=rank_and_world_size()[0])).plan
    if plan.world_size == 1:
        return resources.enter_context(offload.lease(plan)).plan
    # The ranks must share the folder's name before there is an engine. The engine joins this group,
    # which stays open for the barrier before the folder is deleted.
    backend = accelerator_for(plan.platform.accelerator).communication_backend
    group = ProcessGroup(backend=backend, timeout_s=timeout_s)
    resources.callback(group.close)
    # The lease would raise an error on ranks that differ from rank 0, but not on rank 0.
    check_same_plan(plan, group)
    lease = offload.lease(
        plan,
        rank=group.rank,
        # A foreign trainer may have destroyed the group; then only the folder's locks count.
        barrier=lambda: group.barrier("release the swap folder") if dist.is_initialized() else None,
        share=group.broadcast,
    )
    return resources.enter_context(lease).plan


# -- From a resolved plan to its engine.


def build_engine(*, model: torch.nn.Module, plan: ResolvedPlan, timeout_s: float = 600.0) -> Engine:
    """Start the training engine and verify that it matches the plan.

    Args:
        model: The model in fp32.
        plan: A resolved plan with an optimizer.
        timeout_s: Timeout of collectives in seconds.

    Returns:
        A ``HostEngine`` if it can run the plan (on several ranks a ``SharedHostEngine``, and
        without DeepSpeed a ``PlainHostEngine``); otherwise a ``DeepSpeedEngine``, or a
        ``PlainEngine`` if the plan was resolved without DeepSpeed.

    Raises:
        EngineError: The engine cannot run the plan.
        VerificationError: The running engine differs from the plan.
    """
    started = start_hosted(model=model, plan=plan, timeout_s=timeout_s)
    if not isinstance(started, ResolvedPlan):
        return started
    require_other_engine(started)
    kind = DeepSpeedEngine if plan.uses_deepspeed else PlainEngine
    return kind(model=model, plan=started, timeout_s=timeout_s)


def start_hosted(
    *, model: torch.nn.Module, plan: ResolvedPlan, timeout_s: float
) -> HostEngine | ResolvedPlan:
    """Start the host engine, or return the plan that another engine runs instead. Collective."""
    obstacle = why_not_hosted(plan, model)
    if host_obstacle(plan) is None and plan.world_size > 1:
        obstacle = why_not_together(plan, model, obstacle=obstacle, timeout_s=timeout_s)
    if obstacle is not None:
        if plan.update is not None:
            raise EngineError(
                f"only the host engine updates weights on the device, and {obstacle}",
                'remove the obstacle, or resolve the plan with update="host"',
                "update",
                "device",
            )
        return _without_host(plan, obstacle)
    if plan.engine is None:
        plan = plan.with_engine("host", _BY_DEFAULT if plan.uses_deepspeed else _WITHOUT)
    hosts = _HOSTS[plan.uses_deepspeed, plan.world_size > 1]
    return hosts(model=model, plan=plan, timeout_s=timeout_s)


_HOSTS: Final[Mapping[tuple[bool, bool], type[HostEngine]]] = {
    (True, False): HostEngine,
    (True, True): SharedHostEngine,
    (False, False): PlainHostEngine,
    (False, True): SharedPlainHostEngine,
}
"""By whether DeepSpeed is used, and whether there are several ranks."""
_WITHOUT: Final = "the optimizer is an Adam in host memory, and DeepSpeed is off"
_BY_DEFAULT: Final = (
    'the optimizer is an Adam in host memory; plan.resolve(engine="deepspeed") selects the other'
)


def _without_host(plan: ResolvedPlan, obstacle: str) -> ResolvedPlan:
    """The plan for another engine, with the reason where the host engine was wanted."""
    if not plan.uses_deepspeed:
        return _on_the_device(plan, obstacle) if plan.offload_optimizer == "cpu" else plan
    asked = plan.streamed or plan.engine == "host"
    if not asked and (plan.engine is not None or plan.offload_optimizer != "cpu"):
        return plan
    was_hosted = plan.is_hosted
    if plan.streamed:
        plan = attrs.evolve(plan.without_streaming(obstacle), engine="deepspeed")
    else:
        plan = plan.with_engine("deepspeed", obstacle)
    announce(plan.decisions[-1:])
    return _checked_again(plan) if was_hosted else plan


def _checked_again(plan: ResolvedPlan) -> ResolvedPlan:
    """Check host memory for DeepSpeed, which needs more than the host engine that was checked."""
    plan, found = fit_host_memory(plan, ranks=local_ranks(plan))
    announce(found)
    keys = {each.key for each in found}
    former = (each for each in plan.decisions if each.key not in keys)
    return attrs.evolve(plan, decisions=(*former, *found))


def _on_the_device(plan: ResolvedPlan, obstacle: str) -> ResolvedPlan:
    decision = Decision(
        "zero_optimization.offload_optimizer",
        "cpu",
        None,
        f"{obstacle}; the optimizer stays on the device",
        "warning",
    )
    announce((decision,))
    return attrs.evolve(
        plan,
        plan=attrs.evolve(plan.plan, zero_optimization=None),
        decisions=(*plan.decisions, decision),
    )


# -- Checking and converting arguments of ``Trainer`` and ``prepare`` before anything starts.


def as_plan(plan: Any) -> DeepSpeedPlan | ResolvedPlan | Advice:
    """Convert a configuration, or the path to a configuration file, into a plan."""
    if isinstance(plan, DeepSpeedPlan | ResolvedPlan | Advice):
        return plan
    if isinstance(plan, str | os.PathLike):
        return DeepSpeedPlan.load(plan)
    if isinstance(plan, Mapping):
        return DeepSpeedPlan.from_dict(plan)
    raise InvalidValueError(
        "is not a plan",
        "pass a DeepSpeedPlan, a DeepSpeed configuration as a dict, or the path of a "
        "configuration file",
        "plan",
        plan,
    )


def check_model(model: Any) -> None:
    """Check that the model is a module that can be trained."""
    if isinstance(model, torch.nn.Module):
        _check_whole(model)
        return
    value: Any = model if isinstance(model, str | os.PathLike) else type(model).__name__
    if isinstance(model, type):
        value, why = model.__name__, "is a class, not a model"
        fix = f"create the model: {value}(…) or {value}.from_pretrained(FOLDER)"
    elif isinstance(model, str | os.PathLike):
        why = "is a path to a model, not the model itself"
        fix = f"write loaded = zerotune.load_pretrained({os.fspath(model)!r}), then loaded.model"
    elif hasattr(model, "components") or hasattr(model, "save_pretrained"):
        why = "is a whole pipeline, but only one of its models can be trained"
        fix = "use zerotune.load_pretrained(FOLDER), which returns model and objective, or pass "
        fix += "pipeline.unet or pipeline.transformer"
    else:
        why, fix = "is not a torch.nn.Module", "pass the module to train"
    raise InvalidValueError(why, fix, "model", value)


def _check_whole(model: torch.nn.Module) -> None:
    """Check that no module is compiled, lazy, sparse, or wrapped by peft's modules_to_save."""
    for name, module in model.named_modules():
        key, value = f"model.{name}" if name else "model", type(module).__name__
        if "_orig_mod" in vars(module)["_modules"]:
            raise InvalidValueError(
                "torch.compile returned this module, which adds _orig_mod to the names of weights "
                "in checkpoints and exports",
                "pass the original module and compile=True, or write "
                "module.forward = torch.compile(module.forward)",
                key,
                value,
            )
        if any(map(torch.nn.parameter.is_lazy, module.parameters(recurse=False))):
            raise InvalidValueError(
                "is a lazy module, whose weights have no shape yet",
                "call the model once before you pass it",
                key,
                value,
            )
        if type(module).__name__ == "ModulesToSaveWrapper":
            raise InvalidValueError(
                "peft wraps this module, which would rename its weights in checkpoints and exports",
                "omit modules_to_save, and target the module with adapters as well",
                f"{key} (modules_to_save)",
                value,
            )
        if getattr(module, "sparse", None) is True and module.weight.requires_grad:
            raise InvalidValueError(
                "has sparse gradients, which no engine supports",
                "write sparse=False",
                f"{key}.sparse",
                True,
            )


def check_objective(objective: Any, model: torch.nn.Module) -> None:
    """Check that the objective passes the conditioning that the model requires.

    Args:
        objective: The objective; ``None`` means the default objective, which is unconditional.
        model: The model that the objective calls.
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
        + " passes only noisy images",
        "write objective=FlowMatchingObjective(family=ClassConditional())"
        if labels
        else "write loaded = zerotune.load_pretrained(FOLDER), then objective=loaded.objective()",
        "objective",
        None if objective is None else type(objective).__name__,
    )


_LOSSES: Final = "torch.nn.modules.loss"


def _check_callable(objective: Any) -> None:
    of_torch = getattr(objective, "__module__", "") in ("torch.nn.functional", _LOSSES)
    if callable(objective) and not isinstance(objective, type) and not of_torch:
        try:
            inspect.signature(objective).bind("model", "batch", "generator")
        except TypeError as error:
            raise InvalidValueError(
                f"must accept model, batch and generator ({error})",
                "write def objective(model, batch, generator): … return loss",
                "objective",
                getattr(objective, "__name__", type(objective).__name__),
            ) from error
        except ValueError:  # Some C callables have no signature.
            pass
        return
    raise _no_objective(objective)


def _no_objective(objective: Any) -> InvalidValueError:
    name = objective.__name__ if isinstance(objective, type) else type(objective).__name__
    if isinstance(objective, type):
        why, fix = "is a class", f"create an instance: objective={name}(…)"
    elif callable(objective):
        name = getattr(objective, "__name__", name)
        why = "compares two tensors, but an objective computes the loss of a batch"
        fix = "write objective=DenoisingObjective() or FlowMatchingObjective(), or omit objective"
    elif hasattr(objective, "config") and hasattr(objective, "step"):
        why = "is a scheduler, not an objective"
        flow = "Flow" in name
        kind = "FlowMatchingObjective" if flow else "DenoisingObjective"
        fix = f"write objective={kind}(scheduler=…, family=…), or use "
        fix += "zerotune.load_pretrained(FOLDER).objective(), which has the folder's scheduler"
    else:
        why = "is not callable; an objective computes the loss"
        fix = "pass FlowMatchingObjective(family=…), DenoisingObjective(family=…), "
        fix += "zerotune.load_pretrained(FOLDER).objective(), or a function of model, batch and "
        fix += "generator"
    return InvalidValueError(
        why, fix, "objective", objective if isinstance(objective, str) else name
    )


def _conditioning_of(model: torch.nn.Module) -> str | None:
    """Return the arguments a model requires besides noisy images and time steps."""
    if getattr(model, "class_embedding", None) is not None:
        return "class_labels"
    taken = list(inspect.signature(model.forward).parameters.values())
    # The second argument of SD3's and Flux's transformers is the text, not the time step.
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
    """Check that the argument is an optimizer resolver, not an optimizer."""
    if resolver is None or isinstance(resolver, OptimizerResolver):
        return
    kind = resolver if isinstance(resolver, type) else type(resolver)
    if issubclass(kind, torch.optim.Optimizer):
        name = kind.__name__
        why = "cannot be used: the engine builds the optimizer for the weights that ZeRO partitions"
    else:
        name = resolver if isinstance(resolver, str) else "AdamW"
        why = "is not an OptimizerResolver"
    raise InvalidValueError(
        why,
        f'set the optimizer with DeepSpeedPlan.build(optimizer="{name}", lr=…), or '
        f'pass resolver=OptimizerResolver(overrides={{"optimizer.type": "{name}", "lr": …}})',
        key,
        resolver if isinstance(resolver, str) else kind.__name__,
    )


def refuse_unknown(arguments: Mapping[str, Any], call: str) -> None:
    """Reject unknown keyword arguments.

    Raises:
        InvalidValueError: An argument is named ``optimizer``; the optimizer belongs in the plan.
        TypeError: An argument with any other name is given.
    """
    if isinstance(arguments.get("optimizer"), OptimizerResolver):
        raise InvalidValueError(
            "is a resolver, not an optimizer",
            "write resolver=… instead of optimizer=…",
            "optimizer",
            "OptimizerResolver",
        )
    check_resolver(arguments.get("optimizer"), key="optimizer")
    if arguments:
        raise TypeError(f"{call}() got an unexpected keyword argument {min(arguments)!r}")


def check_kind(value: Any, kind: type, *, key: str, write: str) -> None:
    """Check the class of an optional argument.

    Args:
        value: The argument's value; ``None`` if omitted.
        kind: The required class or runtime-checkable protocol.
        key: Name of the argument.
        write: Expression that the error's fix recommends.
    """
    if value is None or (isinstance(value, kind) and not isinstance(value, type)):
        return
    raise InvalidValueError(
        "is a class" if isinstance(value, type) else f"is not a valid {kind.__name__}",
        f"write {key}={write}",
        key,
        value.__name__ if isinstance(value, type) else value,
    )


# -- Converting data to endless, resumable micro batches.


_IMAGES_AND_LABELS: Final = 2
_IMAGE_BATCH_DIMS: Final = 4


def as_stream(data: Any, *, engine: Engine, seed: int, **loading: Any) -> BatchStream | None:
    """Return a stream of this rank's micro batches.

    Args:
        data: A ``BatchStream`` (returned unchanged), a dataset, an iterable of this rank's batches,
            or ``None``. Any object with ``__len__`` and ``__getitem__`` counts as a dataset, except
            lists and tuples. A dataset is sharded across the ranks; each batch of a bucketed
            dataset such as ``PreparedImages`` comes from one bucket.
        engine: Provides rank, world size and micro batch size.
        seed: Seed of the order in which a dataset's samples are read.
        loading: ``num_workers`` and ``pin_memory``; accepted only with a dataset.
    """
    if data is None or isinstance(data, BatchStream):
        _check_not_reading(loading, data)
        if isinstance(data, DataStream | BucketStream):
            _check_ranks(data, engine.group)
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
        "pass a dataset with __len__ and __getitem__, or a DataLoader",
        "data",
        type(data).__name__,
    )


def _check_ranks(stream: DataStream | BucketStream, group: ProcessGroup) -> None:
    """Check that a stream yields the batches of this rank, and not those of another."""
    if (stream.rank, stream.world_size) != (group.rank, group.world_size):
        raise InvalidValueError(
            f"the stream yields the batches of rank {stream.rank} of {stream.world_size}, but this "
            f"is rank {group.rank} of {group.world_size}; the ranks would repeat or skip samples",
            "create the stream without rank and world_size, which are then the launcher's, or "
            "pass the dataset",
            "data",
            f"{type(stream).__name__}(rank={stream.rank}, world_size={stream.world_size})",
        )


def _check_not_reading(loading: Mapping[str, Any], data: Any) -> None:
    if loading:
        raise InvalidValueError(
            "apply to datasets only, because an iterable of batches loads its batches itself",
            "pass the dataset, or pass num_workers and pin_memory to the loader or stream",
            "workers, pin",
            type(data).__name__,
        )


def _only_photos(data: Any) -> DataError:
    """Return the error for images that have not been resized to a common size."""
    path = isinstance(data, str | os.PathLike)
    source = f"ImageFolder({os.fspath(data)!r})" if path else type(data).__name__ + "(…)"
    return DataError(
        "is a path to images, not a dataset"
        if path
        else "contains images of different sizes, which cannot form a batch",
        f"write data=PreparedImages({source}, buckets=AspectBuckets(area=1024 * 1024)), or "
        "encode latents and text embeddings once with zerotune.encode_dataset",
        "data",
        data if path else type(data).__name__,
    )


def samples_by_name(data: Any) -> Any:
    """Return a dataset of dicts; a ``TensorDataset`` of images and labels is wrapped."""
    if isinstance(data, TensorDataset) and len(data.tensors) <= _IMAGES_AND_LABELS:
        images, *labels = data.tensors
        if images.ndim == _IMAGE_BATCH_DIMS and images.is_floating_point():
            return ImageTensors(images=images, labels=labels[0] if labels else None)
    if len(data):
        check_named(data[0], key="data[0]")
    return data


def check_named(batch: Any, *, key: str) -> None:
    """Check that a sample or batch is a dict of tensors."""
    if isinstance(batch, Mapping):
        odd = {
            name: type(value).__name__
            for name, value in batch.items()
            if value is None or isinstance(value, str | bytes) or _is_picture(value)
        }
        if odd:
            raise DataError(
                "cannot be converted to tensors",
                "encode these values first with zerotune.encode_dataset or PreparedImages("
                'DatasetImages(dataset, image="image", caption="text"), buckets=…), or omit them',
                key,
                odd,
            )
        return
    kinds = [type(each).__name__ for each in batch] if isinstance(batch, list | tuple) else []
    raise DataError(
        "is not a dict; samples and batches are dicts that map names to tensors",
        _dict_instead(batch),
        key,
        f"{type(batch).__name__} of {', '.join(kinds)}" if kinds else type(batch).__name__,
    )


def _is_picture(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "PIL"


def _dict_instead(batch: Any) -> str:
    pair = isinstance(batch, list | tuple) and len(batch) > 0
    if _is_picture(batch[0] if pair else batch):
        take = (
            "image=0, caption=lambda _: ''" if pair else "image=lambda s: s, caption=lambda _: ''"
        )
        return f"use PreparedImages(DatasetImages(dataset, {take}), buckets=…); see docs/data.md"
    if pair:
        return (
            'return {"images": …, "labels": …} with images (c, h, w) in [-1, 1], or use '
            "ImageTensors(images=…, labels=…)"
        )
    return 'return {"images": …} with images (c, h, w) in [-1, 1], or use ImageTensors(images=…)'
