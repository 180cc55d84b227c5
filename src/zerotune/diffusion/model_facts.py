"""``model_facts``: what planning needs to know about a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from zerotune.diffusion.configuration import Configuration
from zerotune.plan.facts import ModelFacts

if TYPE_CHECKING:
    import torch

    from zerotune.diffusion.facts import MakeInputs


def model_facts(
    source: torch.nn.Module | Mapping[str, Any] | str | os.PathLike[str],
    *,
    inputs: MakeInputs | None = None,
    activations: bool = True,
    name: str | None = None,
) -> ModelFacts:
    """Return the names and shapes of a model's parameters, and its activation memory.

    Facts about the families in ``zerotune.plan.families.family_names()`` are built in. Facts about
    other configurations are measured in a few seconds, and stored in the user's cache folder.

    Args:
        source: A module (on the ``meta`` device unless ``activations=False``), a diffusers
            configuration (a mapping with ``_class_name``), a ``config.json``, or a folder that
            contains a ``config.json``. If it is a configuration, the model is built on the ``meta``
            device, so its weights need no memory.
        inputs: Function that creates the arguments of ``forward`` on the ``meta`` device.
            ``inputs`` is not needed for diffusers' U-Nets, SD3 and Flux transformers, and models of
            declared families.
        activations: ``False`` omits activation memory, which saves a few seconds.
        name: Name in reports; by default the class name.

    Raises:
        InvalidValueError: The class or file does not exist, or ``inputs`` is required but missing.
        MissingDependencyError: The model's pipeline needs transformers, which is not installed.
    """
    config = Configuration.read(source) if isinstance(source, Mapping | str | os.PathLike) else None
    facts = None if config is None or inputs is not None else config.known_facts()
    if facts is None:
        # Loads torch, which known facts do not need.
        from zerotune.diffusion.facts import facts_of_module

        module: Any = source if config is None else config.build()
        facts = facts_of_module(module, inputs=inputs, activations=activations)
        if config is not None and inputs is None and activations:
            config.cache(facts)
    elif not activations:
        facts = attrs.evolve(facts, activations=None, arithmetic=None)
    if config is not None:
        facts = attrs.evolve(facts, name=config.name)
    return facts if name is None else attrs.evolve(facts, name=name)
