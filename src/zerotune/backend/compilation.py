"""Apply ``torch.compile`` in a way that works at every ZeRO stage.

zerotune compiles a module's ``forward``, not its ``__call__``, so that hooks stay outside the
graph; stage 3 gathers and releases weights in hooks. Below stage 3, the whole model can be one
graph. At stage 3, a graph must not contain modules that gather their own weights, so zerotune
compiles the plan's leaf modules one by one; DeepSpeed gathers each leaf module as a whole.
Compiling ``__call__`` would break the graph at every hook: 61 graph breaks for a U-Net with 50,000
parameters.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch

from zerotune.backend.deepspeed.leaf_modules import named_leaf_modules
from zerotune.backend.host.units import find_units
from zerotune.decisions import Decision, announce
from zerotune.errors import EngineError, InvalidValueError, VerificationError
from zerotune.plan.facts import outermost_modules

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine
    from zerotune.plan.plan import ResolvedPlan

KEY: Final = "compile"
_OTHER_VARIANTS: Final = 8
"""Additional compiled variants of a block, for training, evaluation and different sizes."""
_compiled_for: weakref.WeakKeyDictionary[Any, Compiled] = weakref.WeakKeyDictionary()


@attrs.frozen(kw_only=True)
class Compilation:
    """Compile options; all fields except ``blocks`` are arguments of ``torch.compile``."""

    blocks: tuple[str, ...] | None = attrs.field(
        default=None, converter=attrs.converters.optional(tuple)
    )
    """Classes of blocks to compile one by one, such as ``("BasicTransformerBlock",)``; ``()``
    compiles the whole model. Default: the repeated blocks that diffusers declares for the model; if
    it declares none, the whole model."""
    backend: str = "inductor"
    mode: str | None = None
    dynamic: bool | None = None
    fullgraph: bool = False

    @classmethod
    def of(cls, wanted: bool | Mapping[str, Any] | Compilation) -> Compilation | None:
        """Convert a value of ``compile=`` to options.

        Args:
            wanted: ``False`` (returns ``None``), ``True`` (defaults), a mapping, or options.
        """
        if isinstance(wanted, Compilation):
            return wanted
        if isinstance(wanted, bool):
            return cls() if wanted else None
        known = [field.name for field in attrs.fields(cls)]
        unknown = sorted(set(wanted) - set(known))
        if unknown:
            raise InvalidValueError(
                f"has unknown options {', '.join(map(repr, unknown))}",
                f"use only {', '.join(known)}",
                KEY,
                dict(wanted),
            )
        return cls(**wanted)

    def _regions(
        self, model: torch.nn.Module, plan: ResolvedPlan
    ) -> tuple[list[torch.nn.Module], str]:
        if plan.stage == 3 and not plan.is_hosted:
            return self._leaf_modules(model, plan)
        names, why = self.blocks, "set in compile="
        if names is None:
            names = tuple(getattr(model, "_repeated_blocks", None) or ())
            why = "the model's repeated blocks; blocks of the same class share one graph"
        if not names and (streaming := plan.streaming) is not None:
            units = [module for _, module in find_units(model, streaming.units)]
            return units, "the streamed units, so that hooks cause no graph break"
        if not names:
            return [model], "the whole model in one graph"
        found = [model.get_submodule(name) for name in outermost_modules(model, names)]
        if not found:
            raise EngineError(
                f"{type(model).__name__} has no blocks of these classes",
                f"write some of {_classes_of_blocks(model)}",
                f"{KEY}.blocks",
                names,
            )
        return found, why

    def _leaf_modules(
        self, model: torch.nn.Module, plan: ResolvedPlan
    ) -> tuple[list[torch.nn.Module], str]:
        leaves = named_leaf_modules(plan, model)
        found = [one for one in leaves if not self.blocks or type(one).__name__ in self.blocks]
        if found:
            why = "the plan's leaf modules, which are gathered whole, so hooks cause no graph break"
            return found, why
        have = sorted({type(one).__name__ for one in leaves})
        raise EngineError(
            "at stage 3 only leaf modules can be compiled, and the plan has "
            f"{f'only {have}' if have else 'none for this model'}",
            "add block classes with positional inputs, such as "
            f"{_classes_of_blocks(model)}, to zero_optimization.leaf_module.classes in the plan",
            KEY,
            self,
        )


class Compiled:
    """A model whose forward passes are compiled until ``undo`` is called.

    Args:
        wanted: Compile options.
        model: The model, before or after the engine starts.
        plan: The resolved plan, which gives the stage and the leaf modules.
    """

    def __init__(self, wanted: Compilation, *, model: torch.nn.Module, plan: ResolvedPlan) -> None:
        self._wanted = wanted
        self._regions, chosen = wanted._regions(model, plan)
        self._gathered = plan.stage == 3
        self._undo = contextlib.ExitStack()
        self._before = _graphs_and_breaks()
        kinds = sorted({type(module).__name__ for module in self._regions})
        self.decisions: tuple[Decision, ...] = (
            Decision(
                KEY, None, f"{len(self._regions)} x {', '.join(kinds)} by {wanted.backend}", chosen
            ),
        )
        """Which modules are compiled, and why."""

    def apply(self, engine: Engine) -> None:
        """Compile the model of a started ``engine``; closing the engine restores the model."""
        config: Any = torch._dynamo.config
        # Blocks of one class share their code. Beyond this limit of variants, torch continues
        # without compiling and only logs a message.
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
        """Restore the uncompiled model. Repeated calls have no effect."""
        self._undo.close()

    @property
    def graphs(self) -> int:
        """Number of graphs that this process has compiled since this object was created."""
        return _graphs_and_breaks()[0] - self._before[0]

    @property
    def graph_breaks(self) -> int:
        """Number of graph breaks in this process since this object was created."""
        return _graphs_and_breaks()[1] - self._before[1]

    def verify(self) -> Decision:
        """Return a decision about graphs and graph breaks; call this after a training step.

        Raises:
            VerificationError: No graph was compiled.
        """
        if self.graphs == 0:
            raise VerificationError(
                "no graph was compiled in the first training step",
                "unset TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE, or use compile=False",
                KEY,
                self._wanted,
            )
        return Decision(
            f"{KEY}.graphs",
            None,
            self.graphs,
            f"number of graphs compiled in the first step, with {self.graph_breaks} graph break(s)",
            "warning" if self.graph_breaks else "note",
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
    """Return the ``Compiled`` object of an engine's model; ``None`` if the model is not compiled.

    Args:
        engine: The engine.
    """
    return _compiled_for.get(engine)


@contextlib.contextmanager
def _one_graph_for_all_parameters() -> Iterator[None]:
    """Let blocks with gathered parameters share one graph.

    Inside the graph, DeepSpeed checks whether a parameter has a ``ds_id``. torch 2.11 turns this
    check into a guard on the id's value, so that no graph would fit a second block.
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


def _classes_of_blocks(model: torch.nn.Module) -> list[str]:
    return sorted({type(module).__name__ for _, module in find_units(model)})
