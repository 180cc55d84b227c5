"""``torch.compile`` in the way that works with every ZeRO stage.

What is compiled is a module's ``forward``, never its call: hooks, with which stage 3 gathers and
releases weights, stay outside of the graph. Below stage 3 that may be the whole model; at stage 3
a graph must not hold a module that gathers for itself, so the plan's leaf modules, each of which
DeepSpeed gathers as a whole, are compiled one by one. Compiling the call instead works too, but
breaks the graph at every hook: 61 times for a U-Net of 50,000 parameters.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch

from zerotune.backend.deepspeed.sharded import named_leaf_modules
from zerotune.backend.stream.units import find_units
from zerotune.decisions import Decision, announce
from zerotune.errors import EngineError, InvalidValueError, VerificationError

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine
    from zerotune.plan.model import ResolvedPlan

KEY: Final = "compile"
_OTHER_VARIANTS: Final = 8
"""Variants of one block beyond one per block: of training, evaluation and other sizes."""
_compiled_for: weakref.WeakKeyDictionary[Any, Compiled] = weakref.WeakKeyDictionary()


@attrs.frozen(kw_only=True)
class Compilation:
    """How a model is compiled; the other fields are ``torch.compile``'s own."""

    blocks: tuple[str, ...] | None = attrs.field(
        default=None, converter=attrs.converters.optional(tuple)
    )
    """Classes compiled one by one (``("BasicTransformerBlock",)``); ``()``: the whole model.
    ``None``: what diffusers lists as the model's repeated blocks, else the whole model."""
    backend: str = "inductor"
    mode: str | None = None
    dynamic: bool | None = None
    fullgraph: bool = False

    @classmethod
    def of(cls, wanted: bool | Mapping[str, Any] | Compilation) -> Compilation | None:
        """What ``compile=`` means: ``False`` is ``None``, ``True`` the defaults."""
        if isinstance(wanted, Compilation):
            return wanted
        if isinstance(wanted, bool):
            return cls() if wanted else None
        known = [field.name for field in attrs.fields(cls)]
        unknown = sorted(set(wanted) - set(known))
        if unknown:
            raise InvalidValueError(
                f"knows no {', '.join(map(repr, unknown))}",
                key=KEY,
                value=dict(wanted),
                fix=f"use {', '.join(known)}",
            )
        return cls(**wanted)

    def _regions(
        self, model: torch.nn.Module, plan: ResolvedPlan
    ) -> tuple[list[torch.nn.Module], str]:
        if plan.stage == 3:
            return self._leaf_modules(model, plan)
        names, why = self.blocks, "asked for"
        if names is None:
            names = tuple(getattr(model, "_repeated_blocks", None) or ())
            why = "the model's repeated blocks, each compiled once for all of its kind"
        if not names and (streaming := plan.streaming) is not None:
            units = [module for _, module in find_units(model, streaming.units)]
            return units, "the units that are streamed, so that no hook breaks their graph"
        if not names:
            return [model], "the whole model in one graph"
        found = _outermost(model, frozenset(names))
        if not found:
            raise EngineError(
                f"{type(model).__name__} has no blocks of these classes",
                key=f"{KEY}.blocks",
                value=names,
                fix=f"name some of {_repeated_classes(model)}",
            )
        return found, why

    def _leaf_modules(
        self, model: torch.nn.Module, plan: ResolvedPlan
    ) -> tuple[list[torch.nn.Module], str]:
        leaves = named_leaf_modules(plan, model)
        found = [one for one in leaves if not self.blocks or type(one).__name__ in self.blocks]
        if found:
            why = "the plan's leaf modules, gathered whole, so that no hook breaks their graph"
            return found, why
        have = sorted({type(one).__name__ for one in leaves})
        raise EngineError(
            "at stage 3 every module gathers its own weights but leaf modules, so only those can "
            f"be compiled, and the plan has {f'only {have}' if have else 'none for this model'}",
            key=KEY,
            value=self,
            fix='name blocks that are called with positional inputs in the plan: {"leaf_module": '
            f'{{"classes": [...]}}}} of zero_optimization, such as {_repeated_classes(model)}',
        )

    def _check_toolchain(self, plan: ResolvedPlan) -> None:
        reason = None
        dynamo: Any = torch._dynamo
        if not dynamo.is_dynamo_supported():
            reason = "torch cannot compile on this Python or system"
            fix = "use another, or no compile"
        elif self.backend == "inductor" and plan.platform.accelerator == "cpu":
            compiler = os.environ.get("CXX", "g++")
            if shutil.which(compiler) is None and shutil.which("clang++") is None:
                reason = f"inductor writes C++ for the CPU, and there is no {compiler}"
                fix = "install a C++ compiler (apt install g++)"
        elif self.backend == "inductor" and importlib.util.find_spec("triton") is None:
            reason = "inductor writes Triton kernels, and triton is missing"
            fix = "pip install triton"
        if reason is not None:
            raise EngineError(reason, key=KEY, value=self, fix=f"{fix}, or use compile=False")


class Compiled:
    """A model whose forward passes are compiled; undone by ``undo``.

    Args:
        wanted: How.
        model: The model, before or after the engine has taken it over.
        plan: Tells the stage, and at stage 3 the leaf modules.
    """

    def __init__(self, wanted: Compilation, *, model: torch.nn.Module, plan: ResolvedPlan) -> None:
        wanted._check_toolchain(plan)
        self._wanted = wanted
        self._regions, chosen = wanted._regions(model, plan)
        self._gathered = plan.stage == 3
        self._undo = contextlib.ExitStack()
        self._before = _graphs_and_breaks()
        kinds = sorted({type(module).__name__ for module in self._regions})
        self.decisions: tuple[Decision, ...] = (
            Decision(
                key=KEY,
                before=None,
                after=f"{len(self._regions)} x {', '.join(kinds)} by {wanted.backend}",
                reason=chosen,
            ),
        )
        """What is compiled, and why it is that."""

    def apply(self, engine: Engine) -> None:
        """Compile, once the engine has made of the model what it wants; ends with the engine."""
        config: Any = torch._dynamo.config
        # Blocks of one class share their code; beyond this many variants torch goes on without
        # compiling, and says so only in a log.
        enough = max(config.recompile_limit, len(self._regions) + _OTHER_VARIANTS)
        self._undo.enter_context(config.patch(recompile_limit=enough))
        if self._gathered:
            self._undo.enter_context(_one_graph_for_all_parameters())
        for module in self._regions:
            self._compile(module)
        engine.resources.callback(self.undo)
        _compiled_for[engine] = self
        announce(self.decisions, rank=engine.group.rank)

    def undo(self) -> None:
        """The model as it was. May be repeated."""
        self._undo.close()

    @property
    def graphs(self) -> int:
        """Graphs that this process has compiled since this object was created."""
        return _graphs_and_breaks()[0] - self._before[0]

    @property
    def graph_breaks(self) -> int:
        """Places where a graph had to be left, in this process."""
        return _graphs_and_breaks()[1] - self._before[1]

    def verify(self) -> Decision:
        """What compiling came to, after a training step."""
        if self.graphs == 0:
            raise VerificationError(
                "no graph was compiled although a step was taken",
                key=KEY,
                value=self._wanted,
                fix="unset TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE, or use compile=False",
            )
        return Decision(
            key=f"{KEY}.graphs",
            before=None,
            after=self.graphs,
            reason=f"graphs of the first step, {self.graph_breaks} break(s) among them",
            severity="warning" if self.graph_breaks else "note",
        )

    def _compile(self, module: torch.nn.Module) -> None:
        wanted = self._wanted
        forward: Callable[..., Any] = module.forward
        if "forward" in vars(module):
            self._undo.callback(setattr, module, "forward", forward)
        else:
            self._undo.callback(vars(module).pop, "forward", None)
        module.forward = torch.compile(
            forward,
            backend=wanted.backend,
            mode=wanted.mode,
            dynamic=wanted.dynamic,
            fullgraph=wanted.fullgraph,
        )


def compiled_for(engine: Engine) -> Compiled | None:
    """What compiles an engine's model; ``None``: nothing does."""
    return _compiled_for.get(engine)


@contextlib.contextmanager
def _one_graph_for_all_parameters() -> Iterator[None]:
    """Let blocks whose parameters are gathered share one graph.

    DeepSpeed asks inside the graph whether a parameter has a ``ds_id``. To torch 2.11 that is a
    question of its number, so that no graph fits another block.
    """
    from deepspeed.runtime.zero.utils import is_zero_param

    marked = vars(is_zero_param).copy()
    assume_constant: Any = torch.compiler.assume_constant_result
    assume_constant(is_zero_param)
    try:
        yield
    finally:
        vars(is_zero_param).clear()
        vars(is_zero_param).update(marked)


def _graphs_and_breaks() -> tuple[int, int]:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"]), sum(counters["graph_break"].values())


def _outermost(module: torch.nn.Module, names: frozenset[str]) -> list[torch.nn.Module]:
    if type(module).__name__ in names:
        return [module]
    return [found for child in module.children() for found in _outermost(child, names)]


def _repeated_classes(model: torch.nn.Module) -> list[str]:
    """Classes of blocks: modules of modules that occur more than once."""
    kinds = [
        type(module).__name__
        for module in model.modules()
        if not isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)
        and any(True for _ in module.children())
    ]
    return sorted({kind for kind in kinds if kinds.count(kind) > 1})[:6]
