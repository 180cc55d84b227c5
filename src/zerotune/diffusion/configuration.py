"""Configurations of diffusers models, and the facts that are known about them.

Facts that are built in or cached are found without torch and diffusers, whose import takes longer
than most counts.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import attrs

from zerotune._util.files import write_atomically
from zerotune._util.text import json_of
from zerotune.errors import InvalidValueError
from zerotune.plan.facts import ModelFacts
from zerotune.plan.families import facts_from_json, facts_to_json, family_of

ARGUMENTS: Final = Path(__file__).with_name("arguments.json")
"""Default arguments of the known families' model classes, and the diffusers version that has them;
``python -m tools.families`` writes this file."""


@attrs.frozen
class Configuration:
    """A diffusers configuration, whose facts are part of zerotune, cached or unknown."""

    content: Mapping[str, Any]

    @classmethod
    def read(cls, source: Mapping[str, Any] | str | os.PathLike[str]) -> Configuration:
        """Read a mapping, a ``config.json``, or a folder that contains one.

        Raises:
            InvalidValueError: The file cannot be read.
        """
        if isinstance(source, Mapping):
            return cls(source)
        path = Path(source)
        file = path / "config.json" if path.is_dir() else path
        try:
            config = json_of(file.read_text())
        except (OSError, ValueError) as error:
            raise InvalidValueError(
                f"cannot be read as a diffusers configuration: {error}",
                "pass the folder of a model, its config.json, or a mapping",
                "source",
                str(source),
            ) from error
        return cls(config if isinstance(config, Mapping) else {})

    @property
    def name(self) -> str:
        """Name of the model's class."""
        return str(self.content.get("_class_name"))

    @property
    def kind(self) -> Any:
        """The model's class.

        Raises:
            InvalidValueError: diffusers has no model class of this name.
        """
        import diffusers

        kind = getattr(diffusers, self.name, None)
        if kind is None or not hasattr(kind, "from_config"):
            raise InvalidValueError(
                "is not a diffusers model class",
                'write the name of a model class, such as "UNet2DConditionModel"',
                "_class_name",
                self.content.get("_class_name"),
            )
        return kind

    def build(self) -> Any:
        """Build the model on the ``meta`` device, where its weights need no memory."""
        import torch

        with torch.device("meta"):
            return self.kind.from_config(dict(self.content))

    @cached_property
    def digest(self) -> str:
        """Digest of the configuration, including the defaults of its class."""
        known = json.loads(ARGUMENTS.read_text(encoding="utf-8"))
        stored = (
            known["classes"].get(self.name) if known["diffusers"] == version("diffusers") else None
        )
        arguments = stored or self.default_arguments()
        # Published files use null and false interchangeably.
        full = {name: self.content.get(name, value) or None for name, value in arguments.items()}
        text = json.dumps([self.name, full], sort_keys=True, default=repr)
        return hashlib.sha256(text.encode()).hexdigest()

    def default_arguments(self) -> dict[str, Any]:
        """Return the arguments of the model's class that have a default."""
        arguments = inspect.signature(self.kind.__init__).parameters.values()
        return {
            each.name: each.default
            for each in arguments
            if each.default is not inspect.Parameter.empty
        }

    def known_facts(self) -> ModelFacts | None:
        """Return facts that are built in or cached, or ``None``."""
        if (family := family_of(self.digest)) is not None:
            return family.facts
        try:
            return facts_from_json(json_of(self.file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def cache(self, facts: ModelFacts) -> None:
        """Store measured facts for later processes, if the cache folder is writable."""
        path = self.file
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(facts_to_json(facts)).encode())
        except OSError as error:
            log = logging.getLogger("zerotune")
            log.info("the facts of %s could not be cached: %s", facts.name, error)

    @cached_property
    def file(self) -> Path:
        """The cache file; its name depends on zerotune, torch and diffusers."""
        versions = f"{version('torch')} {version('diffusers')}"
        code = hashlib.sha256(f"{self.digest} {versions}".encode())
        for source in sorted(Path(__file__).parent.rglob("*.py")):
            code.update(source.read_bytes())
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        return Path(cache) / "zerotune" / "facts" / f"{code.hexdigest()}.json"
