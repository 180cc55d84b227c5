"""How a plan is read, written and changed: the methods every ``DeepSpeedPlan`` has for it."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, cast

from zerotune.plan.section import Section

if TYPE_CHECKING:
    from zerotune.plan.deepspeed_plan import DeepSpeedPlan
    from zerotune.plan.writing import SavedPlan


class PlanFormats(Section):
    """Readers, writers and overrides of a plan; the work is done in the modules named inside."""

    __slots__ = ()

    @classmethod
    def from_dict(
        cls,
        config: Mapping[str, Any],
        *,
        source: str = "dict",
        also_known: Collection[str] = (),
    ) -> DeepSpeedPlan:
        """Read a DeepSpeed configuration, or a dict that holds one as ``deepspeed_config``.

        Args:
            config: The configuration, as ``json.load`` gives it.
            source: Name used in messages.
            also_known: Paths of further keys to pass through, for a DeepSpeed newer than the
                one zerotune knows (``"zero_optimization.new_key"``).

        Raises:
            PlanError: Unknown key, wrong type, value out of range, contradicting spellings.
        """
        from zerotune.plan.reading import plan_from_mapping

        return plan_from_mapping(config, source=source, also_known=also_known)

    @classmethod
    def from_json(cls, path_or_text: str | os.PathLike[str]) -> DeepSpeedPlan:
        """Read a JSON file, or JSON text (anything that starts with ``{``).

        Comments and trailing commas are accepted with a warning; other mistakes are errors with
        line and column. A trainer's file that holds ``deepspeed_config`` is unwrapped.

        Raises:
            PlanFileError: The file is missing or cannot be read.
            PlanSyntaxError: Not JSON.
            PlanError: As in ``from_dict``.
        """
        from zerotune.plan.reading import plan_from_json

        return plan_from_json(path_or_text)

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> DeepSpeedPlan:
        """Read the YAML of ``accelerate config``.

        Raises:
            PlanFileError: The file, or the ``deepspeed_config_file`` it names, is missing.
            PlanSyntaxError: Not YAML.
            PlanError: As in ``from_dict``; also a file that does not use DeepSpeed.
        """
        from zerotune.plan.accelerate_yaml import plan_from_yaml

        return plan_from_yaml(path)

    @classmethod
    def from_accelerate_environment(cls, environ: Mapping[str, str] | None = None) -> DeepSpeedPlan:
        """Read the variables that ``accelerate launch`` sets; accelerate itself is not needed.

        ``accelerate launch`` does not pass the paths of NVMe folders on: where one is missing, a
        warning is recorded.

        Args:
            environ: The variables; those of this process by default.

        Raises:
            InvalidValueError: They do not ask for DeepSpeed.
            PlanError: As in ``from_yaml``.
        """
        from zerotune.plan.accelerate_environment import plan_from_environment

        return plan_from_environment(environ)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DeepSpeedPlan:
        """Read a file by its suffix: ``.yaml`` and ``.yml`` as accelerate's, else JSON."""
        from pathlib import Path

        file = Path(path)
        yaml = file.suffix.lower() in (".yaml", ".yml")
        return cls.from_yaml(file) if yaml else cls.from_json(file)

    def to_deepspeed(self) -> dict[str, Any]:
        """The configuration as written; may hold ``"auto"``. A fresh, deep copy."""
        return self.to_dict()

    def to_json(self, *, indent: int = 2) -> str:
        """The configuration as written, as JSON text."""
        import json

        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def to_yaml(self) -> str:
        """The YAML of ``accelerate config`` that says this plan.

        What had to be said in another way is logged; ``plan_document`` gives it as data.
        """
        from zerotune.decisions import announce
        from zerotune.plan.writing import plan_document

        document = plan_document(self._plan, "accelerate")
        announce(document.decisions)
        return document.text

    def to_python(self) -> str:
        """A Python expression equal to this plan, given the names of ``zerotune.plan``."""
        from zerotune.plan.writing_python import python_expression

        return python_expression(self._plan)

    def save(self, path: str | os.PathLike[str], *, format: str | None = None) -> SavedPlan:  # noqa: A002
        """Write the plan to a file, which is whole or not there; what it replaces is kept.

        Args:
            path: The file. Its predecessor is kept beside it as ``….bak``.
            format: ``"deepspeed"``, ``"accelerate"``, ``"python"`` or ``"trainer"`` (a
                ``config.json`` with a ``deepspeed_config``: everything else of an existing file
                is kept, and the form in which it holds the configuration); by default from the
                suffix and from what the file holds.

        Raises:
            PlanFileError: The file cannot be written.
            PlanError: An existing file that must be kept in part cannot be read.
        """
        from zerotune.plan.writing import save_plan

        return save_plan(self._plan, path, format=format)

    def normalised(self) -> DeepSpeedPlan:
        """The plan in canonical spelling, as reading gives it; what changes is recorded.

        Names of optimizers and schedulers stay as written: only ``zerotune.optim`` knows them.
        """
        from zerotune.plan.normalising import normalised_plan

        return normalised_plan(self._plan)

    def with_overrides(self, overrides: Mapping[str, Any]) -> DeepSpeedPlan:
        """The plan with some settings changed, each change recorded as a decision.

        Args:
            overrides: By path (``"zero_optimization.stage"``), nested, or by the short names of
                ``zerotune.plan.overrides.SHORT_NAMES`` (``"zero_stage"``, ``"mixed_precision"``);
                ``None`` removes a setting.

        Raises:
            PlanError: As in ``from_dict``; also one setting given twice under two names.
        """
        from zerotune.plan.overrides import override_plan

        return override_plan(self._plan, overrides)

    @property
    def _plan(self) -> DeepSpeedPlan:
        # This class has one subclass, and is apart only because both together are too long.
        return cast("DeepSpeedPlan", self)
