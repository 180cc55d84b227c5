"""Pipelines of diffusers' modular blocks, for families of models that exist only as blocks.

Blocks run without gradients, and their loops log every exception. A ``BlocksPipeline`` therefore
runs the functions that blocks wrap, up to the end of the denoising loop.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

import torch
from diffusers import DiffusionPipeline
from diffusers.modular_pipelines import LoopSequentialPipelineBlocks, ModularPipelineBlocks
from diffusers.modular_pipelines.modular_pipeline import PipelineState

from zerotune._util.text import did_you_mean
from zerotune.errors import InvalidValueError, MissingDependencyError

_TEXTS: Final = "text_encoder"
_DENOISE: Final = "denoise"
"""Names by which all of diffusers' modular pipelines call these two blocks."""

_GUIDED_BY: Final = "guidance_scale"


class BlocksPipeline(DiffusionPipeline):  # type: ignore[misc]
    """A pipeline whose ``__call__`` runs modular blocks; ``blocks_pipeline`` makes its classes.

    Args:
        **components: Components and settings by name; those that no block expects are ignored.
    """

    blocks: ClassVar[ModularPipelineBlocks]
    """Blocks of one task, such as text to image."""
    texts: ClassVar[tuple[str, ...]]
    """Paths of the blocks that encode texts."""

    def __init__(self, **components: Any) -> None:
        super().__init__()
        self.register_modules(**{name: components.get(name) for name in _loaded(self.blocks)})
        configs = {each.name: each.default for each in self.blocks.expected_configs}
        self.register_to_config(**{n: components.get(n, value) for n, value in configs.items()})

    def encode_prompt(
        self,
        prompt: list[str],
        negative_prompt: list[str] | None = None,
        max_sequence_length: int | None = None,
        do_classifier_free_guidance: bool = False,
    ) -> Mapping[str, torch.Tensor]:
        """Return the outputs of the block that encodes texts, by name.

        Args:
            prompt: Prompts.
            negative_prompt: Negative prompts, one per prompt.
            max_sequence_length: Number of tokens per text; by default the block's.
            do_classifier_free_guidance: Whether to encode negative prompts too.
        """
        inputs = {
            "prompt": prompt,
            "negative_prompt": negative_prompt,
            "max_sequence_length": max_sequence_length,
        }
        given = {name: value for name, value in inputs.items() if value is not None}
        try:
            state = self._encoded(given, 2.0 if do_classifier_free_guidance else 1.0)
        except UnboundLocalError:  # Wan's block works only with guidance.
            state = self._encoded(given, 2.0)
        return {name: state.get(name) for name in self._text_outputs() if name in state.values}

    def _encoded(self, given: Mapping[str, Any], guidance_scale: float) -> PipelineState:
        modular, state = self._modular(guidance_scale), self._state(given)
        for block in self._text_blocks():
            for each in block.expected_components:
                part = getattr(modular, each.name)
                if isinstance(part, torch.nn.Module):
                    part.to(modular._execution_device)
            try:
                run(block, modular, state)
            except UnboundLocalError:
                raise
            except NameError as error:  # diffusers imports optional packages without a check
                raise MissingDependencyError(
                    f"{type(block).__name__} needs a package that is not installed ({error})",
                    "install the package that the message names",
                ) from error
        return state

    def denoise(self, inputs: Mapping[str, Any]) -> tuple[torch.Tensor]:
        """Run the blocks up to the end of the denoising loop, with gradients if they are enabled.

        Args:
            inputs: Inputs of the blocks by name, and ``guidance_scale`` for their guider.

        Returns:
            The latents, in the layout of the loop.
        """
        modular = self._modular(inputs.get(_GUIDED_BY))
        # Wan's loop needs negative texts even without guidance, which does not read them.
        unread = {f"negative_{name}": value for name, value in inputs.items()}
        texts = self._text_outputs()
        state = self._state({n: v for n, v in unread.items() if n in texts} | dict(inputs))
        for path, block in self.blocks.sub_blocks.items():
            # Blocks of a task are flat: "denoise.input", "denoise.prepare_latents".
            wanted = _is_below(path, (_DENOISE,)) and not _is_below(path, self.texts)
            if wanted and run(block, modular, state):
                break
        return (state.get("latents"),)

    def _text_blocks(self) -> list[ModularPipelineBlocks]:
        blocks = self.blocks.sub_blocks.items()
        return [block for path, block in blocks if _is_below(path, self.texts)]

    def _text_outputs(self) -> dict[str, str | None]:
        """Return the kind of each text output; guiders read inputs by kind."""
        outputs = (each for block in self._text_blocks() for each in block.intermediate_outputs)
        return {each.name: each.kwargs_type for each in outputs}

    def _modular(self, guidance_scale: float | None) -> Any:
        modular = self.blocks.init_pipeline()
        for name, component in self.components.items():
            setattr(modular, name, component)
        names = [each.name for each in self.blocks.expected_configs]
        modular.register_to_config(**{name: self.config[name] for name in names})
        guider = getattr(modular, "guider", None)
        if guider is not None and guidance_scale is not None:
            # Scale 1 calls the model once, whatever the guider does.
            modular.guider = guider.new(
                guidance_scale=guidance_scale, enabled=guidance_scale != 1.0
            )
        return modular

    def _state(self, inputs: Mapping[str, Any]) -> PipelineState:
        state, kinds = PipelineState(), self._text_outputs()
        for each in self.blocks.inputs:
            if each.name is not None:
                state.set(each.name, each.default, each.kwargs_type)
        for name, value in inputs.items():
            state.set(name, value, kinds.get(name))
        return state


def blocks_pipeline(
    name: str, workflow: str | None = None, *, texts: tuple[str, ...] = (_TEXTS,)
) -> type[BlocksPipeline]:
    """Return the pipeline class of diffusers' modular blocks, for ``pipeline`` in a family.

    Args:
        name: Name of a blocks class of diffusers, such as ``"AnimaAutoBlocks"``.
        workflow: One of the class's tasks; by default ``"text2image"`` or ``"text2video"``.
        texts: Paths of the blocks that encode texts; only their outputs depend on texts.

    Raises:
        InvalidValueError: The installed diffusers has no such blocks, or they cannot be read: they
            have no such task, no block that encodes texts, or no denoising loop.
    """
    import diffusers

    kind = getattr(diffusers, str(name), None)
    if not (isinstance(kind, type) and issubclass(kind, ModularPipelineBlocks)):
        known = [each for each in dir(diffusers) if each.endswith("Blocks")]
        near = did_you_mean(str(name), known)
        raise InvalidValueError(
            f"diffusers {diffusers.__version__} has no blocks of this name",
            f"did you mean {' or '.join(near)}?" if near else f"one of {', '.join(known)}",
            "name",
            name,
        )
    blocks = _of_workflow(kind(), workflow, name)
    paths = list(blocks.sub_blocks)
    lacking = [e for e in (*texts, _DENOISE) if not any(_is_below(path, (e,)) for path in paths)]
    if lacking or not any(map(_has_loop, blocks.sub_blocks.values())):
        what = f"no block named {lacking[0]!r}" if lacking else "no denoising loop of blocks"
        raise InvalidValueError(
            f"these blocks cannot be read, because they have {what}",
            "override embed and predict in a family (docs/families.md)",
            "name",
            name,
        )
    return type(
        name.removesuffix("Blocks").removesuffix("Auto") + "BlocksPipeline",
        (BlocksPipeline,),
        {
            "blocks": blocks,
            "texts": texts,
            "__init__": _with_parameters(
                BlocksPipeline.__init__,
                # Parameters without a default are components for diffusers.
                {
                    **dict.fromkeys(_loaded(blocks), inspect.Parameter.empty),
                    **_defaults(blocks.expected_configs),
                },
            ),
            "__call__": torch.no_grad()(
                _with_parameters(_call, {**_defaults(blocks.inputs), _GUIDED_BY: None})
            ),
            "__module__": __name__,
        },
    )


def run(block: Any, modular: Any, state: PipelineState) -> bool:
    """Run a block and the blocks in it; return whether the denoising loop has ended.

    Args:
        block: A block of any kind.
        modular: Modular pipeline with the components.
        state: Inputs and outputs of the blocks, which is changed.
    """
    if isinstance(block, LoopSequentialPipelineBlocks):
        loop = copy.copy(block)
        loop.loop_step = functools.partial(_loop_step, tuple(block.sub_blocks.values()))
        loop.set_progress_bar_config(disable=True)
        inspect.unwrap(type(block).__call__)(loop, modular, state)
        return True
    if hasattr(block, "select_block"):
        names = [name for name in block.block_trigger_inputs if name is not None]
        chosen = block.select_block(**{name: state.get(name) for name in names})
        chosen = chosen or block.default_block_name
        return chosen is not None and run(block.sub_blocks[chosen], modular, state)
    if block.sub_blocks:
        return any(run(each, modular, state) for each in block.sub_blocks.values())
    inspect.unwrap(type(block).__call__)(block, modular, state)
    return False


def _loop_step(blocks: tuple[Any, ...], modular: Any, state: Any, **step: Any) -> tuple[Any, Any]:
    for block in blocks:
        modular, state = inspect.unwrap(type(block).__call__)(block, modular, state, **step)
    return modular, state


def _call(self: BlocksPipeline, **inputs: Any) -> tuple[torch.Tensor]:
    return self.denoise(inputs)


def _of_workflow(blocks: Any, workflow: str | None, name: str) -> Any:
    known = list(getattr(blocks, "_workflow_map", None) or ())
    if not known and workflow is None:
        return blocks
    usual = [each for each in ("text2image", "text2video") if each in known]
    chosen = workflow or next(iter(usual), None)
    if chosen not in known:
        raise InvalidValueError(
            f"{name} has no such task",
            f"one of {', '.join(known)}" if known else "remove it",
            "workflow",
            workflow,
        )
    return blocks.get_workflow(chosen)


def _is_below(path: str, parents: tuple[str, ...]) -> bool:
    return any(path == each or path.startswith(f"{each}.") for each in parents)


def _has_loop(block: Any) -> bool:
    loop = isinstance(block, LoopSequentialPipelineBlocks)
    return loop or any(map(_has_loop, block.sub_blocks.values()))


def _loaded(blocks: Any) -> list[str]:
    """Return the names of the components that are loaded from files."""
    return [
        each.name
        for each in blocks.expected_components
        if each.default_creation_method == "from_pretrained"
    ]


def _defaults(parameters: Any) -> dict[str, Any]:
    return {each.name: each.default for each in parameters if each.name is not None}


def _with_parameters(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Any:
    """Return ``function`` with keyword parameters that diffusers and zerotune look up by name."""

    @functools.wraps(function)
    def named(self: Any, **given: Any) -> Any:
        return function(self, **given)

    keyword = inspect.Parameter.KEYWORD_ONLY
    named.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY),
            *(inspect.Parameter(n, keyword, default=value) for n, value in parameters.items()),
        ]
    )
    del named.__wrapped__  # Unwrapping would lose the names.
    return named
