"""The state of the form and the plan it says, one into the other without loss.

The state *is* a plain DeepSpeed configuration beside the launch settings, so there is no key the
form could drop, no ``"auto"`` it could turn into a number and no stage 0 it could turn into 1.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

import attrs

from zerotune.builder.wire import mapping, to_wire
from zerotune.decisions import Decision
from zerotune.errors import InvalidValueError, ZeroTuneError
from zerotune.plan import DeepSpeedPlan
from zerotune.plan.reading import fill_from_launch, read_launch, wrapper_of

_MOST_ERRORS: Final = 20


@attrs.frozen(kw_only=True)
class FormState:
    """What the form holds."""

    config: dict[str, Any] = attrs.field(factory=dict)
    """A DeepSpeed configuration, as far as it is written."""
    launch: dict[str, Any] = attrs.field(factory=dict)
    """Settings of a launcher or trainer around it."""
    setup: dict[str, Any] = attrs.field(factory=dict)
    """What is planned for; see ``setup.Setup``."""

    @classmethod
    def of_request(cls, data: Any) -> FormState:
        """The state a page sent.

        Raises:
            InvalidValueError: It is not one.
        """
        whole = mapping(data, "state")
        return cls(
            **{name: mapping(whole.get(name), name) for name in ("config", "launch", "setup")}
        )

    @classmethod
    def of_plan(cls, plan: DeepSpeedPlan, *, setup: Mapping[str, Any] | None = None) -> FormState:
        """The state that says a plan."""
        launch = plan.launch.to_dict() if plan.launch else {}
        around = dict(setup or {})
        if isinstance(launch.get("num_processes"), int) and launch["num_processes"] > 0:
            around["world_size"] = launch["num_processes"]
        return cls(config=plan.to_dict(), launch=launch, setup=around)

    def data(self) -> dict[str, Any]:
        """The state as the page holds it."""
        return {name: to_wire(getattr(self, name)) for name in ("config", "launch", "setup")}


@attrs.frozen(kw_only=True)
class Reading:
    """A plan read from the form, and what was wrong."""

    plan: DeepSpeedPlan | None
    """``None`` when something is wrong."""
    rest: DeepSpeedPlan | None = None
    """What is left without the settings that are wrong, to find what else is."""
    errors: tuple[ZeroTuneError, ...] = ()
    """Everything that is, as far as each can be told apart from the others."""


def read_plan(state: FormState) -> Reading:
    """The plan a form says; raises nothing.

    One mistake must not hide the next: what is wrong is put aside, and the rest read again.
    """
    errors: list[ZeroTuneError] = []
    config, launch = copy.deepcopy(state.config), dict(state.launch)
    while len(errors) < _MOST_ERRORS:
        try:
            plan = _plan(config, launch)
        except ZeroTuneError as error:
            errors.append(error)
            if not (
                error.key
                and (_put_aside(config, error.key) or _put_launch_aside(launch, error.key))
            ):
                break
        else:
            return Reading(plan=None if errors else plan, rest=plan, errors=tuple(errors))
    return Reading(plan=None, errors=tuple(errors))


def _plan(config: Mapping[str, Any], launch: Mapping[str, Any]) -> DeepSpeedPlan:
    wrapper = wrapper_of(config)
    if wrapper is not None:
        # Reading it could open any file of this machine; only `opening` does, inside the root.
        raise InvalidValueError(
            "is a configuration inside a configuration", key=wrapper, fix="open it as a file"
        )
    plan = DeepSpeedPlan.from_dict(config, source="form")
    decisions: list[Decision] = []
    section = read_launch(launch, decisions)
    plan = fill_from_launch(plan, section)
    return attrs.evolve(plan, decisions=(*plan.decisions, *decisions))


def is_written(config: Any, key: str) -> bool:
    """Whether a configuration has a setting at a path."""
    here = config
    for name in key.split("."):
        if not isinstance(here, dict) or name not in here:
            return False
        here = here[name]
    return True


def _put_aside(config: dict[str, Any], key: str) -> bool:
    """Remove the setting at a path; a path may end above what is written."""
    if not is_written(config, key):
        return False
    *sections, name = key.split(".")
    here: Any = config
    for section in sections:
        here = here[section]
    del here[name]
    return True


def _put_launch_aside(launch: dict[str, Any], key: str) -> bool:
    return launch.pop(key.removeprefix("launch."), None) is not None
