"""Test a family before training by computing tensor shapes only.

The model is on the ``meta`` device, without weights. Masks, sizes and time steps have values,
because pipelines may read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zerotune.backend.upstream import unpartitioned
from zerotune.decisions import Decision
from zerotune.diffusion.data.batches import row_of, stack_named
from zerotune.diffusion.models.pipeline import pipeline_name
from zerotune.diffusion.passes import sizes_only
from zerotune.errors import DataError, InvalidValueError, ZeroTuneError

if TYPE_CHECKING:
    from zerotune.diffusion.models.pipeline_family import PipelineFamily

_PROBED_SAMPLES: Final = 2
_TIMES: Final = (900.0, 100.0)
_PROBED_SIDE: Final = 16
"""Side of the test latents, which is small and divisible by the patch size."""
_PROBED_TEXTS: Final = ("a", "a cat on a wall " * 6)
_BATCH_ROUNDING: Final = 0.05


@attrs.define(eq=False)
class Witness:
    """A model without weights that records its calls."""

    module: torch.nn.Module
    calls: list[tuple[Any, Any]] = attrs.field(factory=list)

    device = torch.device("cpu")
    dtype = torch.float32

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass."""
        self.calls.append((args, kwargs))
        return self.module(*args, **kwargs)

    def _check_calls(self, family: PipelineFamily) -> None:
        single = family.calls_one_by_one()
        wanted = _PROBED_SAMPLES if single else 1
        if len(self.calls) != wanted:
            raise _not_trainable(family, f"its model is called {len(self.calls)} times per step")
        rows = 1 if single else _PROBED_SAMPLES
        for call in self.calls:
            found = _rows_of_call(call)
            if found != rows:
                raise _not_trainable(
                    family,
                    f"its model receives {found} samples instead of {rows}, because "
                    "guidance is enabled",
                )
        if not single and not _tells_samples_apart(self.calls[0]):
            raise _not_trainable(family, "its model does not receive a time step for each sample")


def probe(family: PipelineFamily, model: torch.nn.Module) -> tuple[Decision, ...]:
    """Test a family with a model's configuration, and raise an error if it cannot be trained.

    Args:
        family: Family with its blueprint.
        model: Model of a diffusers class; the test uses a copy without weights.

    Returns:
        A decision with a warning if the model cannot be tested without weights.
    """
    kind: Any = type(model)
    with unpartitioned(), torch.device("meta"):
        module = kind.from_config(model.config).train()
    witness = Witness(module)
    try:
        with sizes_only():
            latents, conditioning = family.example(module, batch=_PROBED_SAMPLES, side=_PROBED_SIDE)
            output = family.predict(witness, latents, torch.tensor(_TIMES), conditioning)
            output.sum().backward()  # type: ignore[no-untyped-call]
    except ZeroTuneError as error:
        reason = f"{error.key}: {error.reason}" if error.key else error.reason
        raise _not_trainable(family, reason, error.fix) from error
    except (NotImplementedError, RuntimeError) as error:
        # torch.autocast fails for the meta device with this unspecific message.
        autocast = str(error) == "unsupported scalarType"
        if "meta" not in str(error).lower() and not autocast:
            raise _not_trainable(family, f"{type(error).__name__}: {error}") from error
        return (
            Decision(
                "family",
                "tested without weights",
                "not tested",
                f"{pipeline_name(family.pipeline)} reads tensor values, which a model "
                f"without weights does not have ({str(error).splitlines()[0]}); the first training "
                "step shows whether the family works",
                "warning",
            ),
        )
    except (TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        raise _not_trainable(family, f"{type(error).__name__}: {error}") from error
    witness._check_calls(family)
    _check_gradients(family, module)
    return ()


def probe_texts(family: PipelineFamily) -> tuple[PipelineFamily, tuple[Decision, ...]]:
    """Test whether texts of different lengths affect each other's embeddings.

    Args:
        family: Family with its frozen parts; nothing is tested if it has no text encoders.

    Returns:
        The family; ``texts_alone`` is set if its pipeline pads texts to the longest text of a
        batch. Decisions, including a warning if texts of different lengths cannot share a micro
        batch.
    """
    encoders = () if family.parts is None else family.parts.modules
    if family.reads_references or not any(name.startswith("text_encoder") for name in encoders):
        return family, ()
    decisions: tuple[Decision, ...] = ()
    alone = [row_of(family.encode_texts([text]), 0) for text in _PROBED_TEXTS]
    together = family.encode_texts(list(_PROBED_TEXTS))
    if not all(_same_embeddings(row_of(together, n), row) for n, row in enumerate(alone)):
        family = attrs.evolve(family, texts_alone=True)
        decisions += (
            Decision(
                "family.texts_alone",
                False,
                True,
                f"{pipeline_name(family.pipeline)} pads texts to the longest one in the "
                "batch, which changes their embeddings; therefore each text is encoded alone",
            ),
        )
    try:
        stack_named(alone)
    except DataError as error:
        decisions += (
            Decision(
                "family.text_tensors",
                "texts of any length in a micro batch",
                "texts of equal length in a micro batch",
                f"{pipeline_name(family.pipeline)} encodes texts of different lengths "
                f"without a mask ({error.key}); train with train_micro_batch_size_per_gpu=1",
                "warning",
            ),
        )
    return family, decisions


def _same_embeddings(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    for name, tensor in other.items():
        if one[name].shape != tensor.shape:
            return False
        # Half precision rounds differently in a batch.
        apart = (one[name].float() - tensor.float()).norm()
        if apart > _BATCH_ROUNDING * tensor.float().norm():
            return False
    return True


def _rows_of_call(call: tuple[Any, Mapping[str, Any]]) -> int:
    """Return the number of samples in a call, taken from its first tensor argument."""
    arguments = [*call[0], *call[1].values()]
    for value in arguments:
        if isinstance(value, Sequence) and value and isinstance(value[0], Tensor):
            return len(value)
        if isinstance(value, Tensor) and value.ndim > 1:
            return len(value)
    return 0


def _tells_samples_apart(call: tuple[Any, Any]) -> bool:
    # Samples differ only in their time step.
    return any(
        isinstance(leaf, Tensor)
        and not leaf.is_meta
        and leaf.ndim > 0
        and len(leaf) == _PROBED_SAMPLES
        and not torch.equal(leaf[0], leaf[1])
        for leaf in tree_leaves(call)
    )


def _check_gradients(family: PipelineFamily, module: torch.nn.Module) -> None:
    lists = [
        each for each in module.children() if isinstance(each, torch.nn.ModuleList) and len(each)
    ]
    blocks = [("first", lists[0][0]), ("last", lists[-1][-1])] if lists else [("only", module)]
    for which, block in blocks:
        trained = list(block.parameters())
        if trained and all(parameter.grad is None for parameter in trained):
            raise _not_trainable(
                family, f"no gradient reaches the {which} block of {type(module).__name__}"
            )


def _not_trainable(
    family: PipelineFamily, reason: str, fix: str | None = None
) -> InvalidValueError:
    return InvalidValueError(
        f"cannot be trained through its pipeline: {reason}",
        fix or "correct the family's declaration, or override predict (docs/families.md)",
        "family",
        f"{type(family).__name__} ({pipeline_name(family.pipeline)})",
    )
