"""Write plans as DeepSpeed's JSON or accelerate's YAML."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from zerotune._util.files import sync, write_atomically
from zerotune._util.text import as_texts, is_integer
from zerotune.decisions import Decision, Log
from zerotune.errors import UNSET, InvalidValueError, PlanFileError, PlanSyntaxError
from zerotune.plan.accelerate import BLOCK, device_list
from zerotune.plan.launch_settings import FILE, INIT_FLAG, STEPS, launch_setting
from zerotune.plan.section import put_setting, read_section, value_at
from zerotune.plan.sections import FP16_BESIDE, PRECISIONS, LaunchSection
from zerotune.plan.settings import Settings, SettingsT, passed_paths
from zerotune.plan.source import (
    YAML_SUFFIXES,
    parse_json,
    read_text,
    refuse_long_yaml,
    wrapper_of,
)
from zerotune.plan.values import AUTO, as_tuple

# -- Atomic writing of files.


def write_whole(path: str | os.PathLike[str], content: bytes) -> Path:
    """Write a file atomically; an existing file is replaced.

    Args:
        path: The file. Missing folders are created, and symbolic links are followed.
        content: Content of the file.

    Returns:
        ``path``.
    """
    final = Path(path).resolve()
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(final, content)
        sync(final.parent)
    except OSError as error:
        raise PlanFileError(
            f"cannot be written ({error.strerror or error})",
            "choose a file in a writable folder",
            os.fspath(path),
        ) from error
    return Path(path)


FORMATS: Final = ("deepspeed", "accelerate")
_OTHER_SUFFIXES: Final = (".toml", ".py", ".ini")


@attrs.frozen(kw_only=True)
class PlanDocument:
    """A plan as text, with the decisions that the format required."""

    format: str
    """``"deepspeed"`` or ``"accelerate"``."""
    text: str
    decisions: tuple[Decision, ...] = attrs.field(default=(), converter=as_tuple)
    """Decisions about settings that are written in a different form or dropped."""


@attrs.frozen(kw_only=True)
class SavedPlan:
    """Result of saving a plan."""

    format: str
    paths: tuple[Path, ...]
    """The file that contains the plan."""
    backups: tuple[Path, ...]
    """The copy of the replaced file; empty if nothing changed."""
    decisions: tuple[Decision, ...]
    """Decisions, as in ``PlanDocument``."""


def plan_document(
    plan: Settings,
    format: str = "deepspeed",  # noqa: A002
    *,
    lossy: Collection[str] = (),
) -> PlanDocument:
    """Convert a plan to text in the given format; reading the text gives an equivalent plan.

    If the format has other names for settings, those names are written.

    Args:
        plan: The plan.
        format: ``"deepspeed"`` (its JSON) or ``"accelerate"`` (YAML).
        lossy: Launch settings that may be dropped if the format does not support them. Settings
            that only affect how processes start are always dropped; a decision records this.
            ``"num_processes"`` must be listed if the batch size per rank depends on it.

    Raises:
        InvalidValueError: The format is unknown, or a launch setting is neither supported by the
            format nor named in ``lossy``.
    """
    dropped = frozenset(name.strip().removeprefix("launch.") for name in as_texts(lossy))
    writer = _Writer(plan=plan, lossy=dropped)
    if format == "deepspeed":
        return writer.deepspeed()
    if format == "accelerate":
        return writer.accelerate()
    raise InvalidValueError(
        "is not a supported format for plans",
        "use one of " + ", ".join(repr(name) for name in FORMATS),
        "format",
        format,
    )


def launchable(plan: SettingsT, *, processes: int = 1) -> SettingsT:
    """Return the plan with what ``accelerate launch --config_file`` needs.

    accelerate's launcher rejects a file without ``num_processes``, or whose ``gpu_ids`` are not
    text; DeepSpeed's launcher and ``torchrun`` ignore the keys.

    Args:
        plan: The plan.
        processes: Number of processes if the plan does not set it.
    """
    launch, log = plan.launch or LaunchSection(), Log(decisions=[*plan.decisions])
    ids = launch.extra.get("gpu_ids")
    if ids is not None and not isinstance(ids, str):
        log.decide("launch.gpu_ids", ids, device_list(ids), "accelerate launch needs text here")
        launch = attrs.evolve(launch, extra={**launch.extra, "gpu_ids": device_list(ids)})
    if launch.num_processes in (None, -1):
        reason = (
            "accelerate launch rejects a file without num_processes; --num_processes overrides "
            "the key"
        )
        log.decide("launch.num_processes", launch.num_processes, processes, reason)
        launch = attrs.evolve(launch, num_processes=processes)
    return attrs.evolve(plan, launch=launch, decisions=log.decisions)


def save_plan(
    plan: Settings,
    path: str | os.PathLike[str],
    *,
    format: str | None = None,  # noqa: A002
    lossy: Collection[str] = (),
) -> SavedPlan:
    """Write a plan to a file as ``DeepSpeedPlan.save`` does."""
    target = Path(path)
    format = format or format_of(target)  # noqa: A001
    document = plan_document(plan, format, lossy=lossy)
    backup = _write_with_backup(target, document.text)
    return SavedPlan(
        format=format,
        paths=(target,),
        backups=() if backup is None else (backup,),
        decisions=document.decisions,
    )


def format_of(path: Path) -> str:
    """Return the format in which to write ``path``, based on its suffix or the existing file."""
    suffix = path.suffix.lower()
    if suffix in YAML_SUFFIXES:
        return "accelerate"
    if suffix in _OTHER_SUFFIXES:
        raise PlanFileError(
            "cannot contain a plan, which is JSON or YAML",
            f"name the file {path.with_suffix('.json').name} or {path.with_suffix('.yaml').name}",
            str(path),
        )
    if not path.exists():
        return "deepspeed"
    try:
        content, _ = parse_json(read_text(path), source=str(path))
    except PlanSyntaxError:
        return "deepspeed"
    if not isinstance(content, Mapping) or wrapper_of(content) is None:
        return "deepspeed"
    raise PlanFileError(
        "contains other settings beside the configuration, which zerotune does not write",
        f"save the plan to a new file, and name it under {wrapper_of(content)}",
        str(path),
    )


# -- Settings that a format does not support.

_BATCH_SIZES: Final = ("train_batch_size", "train_micro_batch_size_per_gpu")


_PRECISION_SECTIONS: Final[Mapping[str, dict[str, Any]]] = {
    "bf16": {},
    "fp16": FP16_BESIDE.to_dict(),
}
"""Sections to write for a precision that was set beside the configuration."""


@attrs.define(kw_only=True)
class _Writer(Log):
    """Conversion of a plan to a format, with its decisions."""

    plan: Settings
    lossy: frozenset[str] = frozenset()
    config: dict[str, Any] = attrs.field(init=False)
    """The configuration as it will be written."""
    launched: dict[str, Any] = attrs.field(init=False)
    """Settings of the launcher that are not written yet."""

    def __attrs_post_init__(self) -> None:
        self.config = self.plan.to_dict()
        self.launched = self.plan.launch.to_dict() if self.plan.launch else {}

    def deepspeed(self) -> PlanDocument:
        """Return DeepSpeed's JSON; training settings of a launcher's file get DeepSpeed's keys."""
        where = "DeepSpeed's own configuration"
        self._settle_inside(where)
        self._settle_precision(f"{where} sets the precision itself")
        config = self._in_order()
        if not self._says_nothing(INIT_FLAG, self.launched.get(INIT_FLAG)):
            flag = config[INIT_FLAG] = self.launched.pop(INIT_FLAG)
            if not flag:  # True is accelerate's default at stage 3.
                reason = "accelerate ignores this key here; launch with --zero3_init_flag false"
                self.decide(f"launch.{INIT_FLAG}", flag, flag, reason, "warning")
        self._drop(self.launched, f"{where} does not support this setting")
        text = json.dumps(config, indent=2, allow_nan=False) + "\n"
        return PlanDocument(format="deepspeed", text=text, decisions=self.decisions)

    def _in_order(self) -> dict[str, Any]:
        """Return the configuration in the order of the plan's fields."""
        log = Log(also_known=passed_paths(self.plan))
        return log.whole(lambda: read_section(Settings, self.config, key="", log=log)).to_dict()

    def _drop(self, left: Mapping[str, Any], why: str) -> None:
        """Record each dropped setting; raise an error if ``lossy`` does not allow it."""
        parts = (self.plan.train_micro_batch_size_per_gpu, self.plan.gradient_accumulation_steps)
        # The number of processes is needed to compute the batch sizes.
        shares = is_integer(self.plan.train_batch_size) and not all(map(is_integer, parts))
        lost: list[str] = []
        for key, value in left.items():
            path, row = f"launch.{key}", launch_setting(key)
            if row.is_origin:
                continue
            if self._says_nothing(key, value):
                self.decide(path, value, None, "it is the launcher's default")
            elif key in self.lossy:
                lost.append(key)
                self.decide(path, value, None, why, "warning")
            elif row.starts and not (shares and key == "num_processes"):
                started = "the setting only affects how processes are launched; pass it to the "
                self.decide(path, value, None, f"{started}launcher")
            else:
                lost.append(key)
        refused = [key for key in lost if key not in self.lossy]
        if not refused:
            return
        others = f" (nor {', '.join(refused[1:])})" if refused[1:] else ""
        # accelerate's format has no place for the precision beside a whole configuration.
        sayable = all(launch_setting(key).place and key != "mixed_precision" for key in refused)
        keep = "use accelerate's format, which supports it, or " if sayable else ""
        raise InvalidValueError(
            f"{why}{others}",
            f"{keep}allow dropping it: lossy={lost}",
            f"launch.{refused[0]}",
            left[refused[0]],
            shell_fix=f"{keep}allow dropping it: --lossy {','.join(lost)}",
        )

    def _says_nothing(self, key: str, value: Any) -> bool:
        if key == INIT_FLAG and self.plan.stage in (0, 1, 2):
            return True
        if key == "dynamo_config" and isinstance(value, Mapping):
            key, value = "dynamo_backend", value.get("dynamo_backend")
        return launch_setting(key).says_nothing(value)

    def _settle_inside(self, where: str) -> None:
        """Move settings from beside the configuration into the configuration."""
        self._settle_batch(where)
        self._settle_swap_folders(where)
        self._settle_automatic_precision(where)

    def _settle_batch(self, where: str) -> None:
        """Move batch and clipping settings of the launcher into the configuration."""
        for key in (STEPS, "gradient_clipping"):
            path, launched = launch_setting(key).path, self.launched.pop(key, None)
            written = self.config.get(path)
            if launched is None:
                continue
            after, is_open = None, written in (None, AUTO)
            sizes = (self.plan.train_batch_size, self.plan.train_micro_batch_size_per_gpu)
            if key == STEPS and is_open and all(map(is_integer, sizes)):
                reason = "the value follows from the two batch sizes, so it is redundant"
            elif is_open:
                self.config[path] = after = launched
                reason = f"{where} has only one key for this setting, so it is written as {path}"
            else:
                kept = f"{path} = {written} takes precedence"
                reason = f"{where} has only one key for this setting, and {kept}"
            self.decide(f"launch.{key}", launched, after, reason)

    def _settle_swap_folders(self, where: str) -> None:
        """Write a trainer's swap folders as ``nvme_path``, over which they take precedence."""
        names = ("offload_param_path", "offload_optimizer_path")
        folders = {name: self.launched.pop(name, None) for name in names}
        shared, own = folders.values()
        for part, folder in {"param": shared, "optimizer": own or shared}.items():
            device = value_at(self.config, f"zero_optimization.offload_{part}.device")
            if folder is not None and device == "nvme":
                path = launch_setting(f"offload_{part}_path").path
                before = put_setting(self.config, path, folder)
                self.decide(path, before, folder, f"{where} names it nvme_path")
        reason = f"{where} has swap folders only for parts that are offloaded to NVMe"
        for name, folder in folders.items():
            if folder is not None:
                self.decide(f"launch.{name}", folder, None, reason)

    def _settle_automatic_precision(self, where: str) -> None:
        if self.launched.get("mixed_precision") != AUTO:
            return
        del self.launched["mixed_precision"]
        reason = f"{where} does not support this setting"
        bf16, fp16 = (value_at(self.config, f"{one}.enabled") for one in _PRECISION_SECTIONS)
        if bf16 is UNSET and fp16 not in (True, AUTO):
            put_setting(self.config, "bf16.enabled", AUTO)
            reason += (
                '; with bf16.enabled = "auto", zerotune chooses the precision, '
                "but accelerate uses fp32"
            )
        self.decide("launch.mixed_precision", AUTO, None, reason, "warning")

    def _settle_precision(self, why: str) -> None:
        """Move the precision into the configuration; fp8 stays outside."""
        asked = self.launched.get("mixed_precision", "")
        written = {one: value_at(self.config, f"{one}.enabled") for one in _PRECISION_SECTIONS}
        stands = asked and (True in written.values() or written.get(asked) is False)
        if not stands and asked not in PRECISIONS:
            return
        del self.launched["mixed_precision"]
        reason = f"{why}: bf16.enabled and fp16.enabled are written instead"
        if written.get(asked) is True:
            reason = f"{why}: {asked}.enabled is true"
        elif stands:
            reason = f"{why}; the precision in the configuration takes precedence"
            self.decide("launch.mixed_precision", asked, None, reason, "warning")
            return
        for name, beside in _PRECISION_SECTIONS.items():
            if not stands and (name == asked or written[name] == AUTO):
                section = self.config.get(name, beside)
                self.config[name] = {"enabled": None} | section | {"enabled": name == asked}
        self.decide("launch.mixed_precision", asked, None, reason)

    def accelerate(self) -> PlanDocument:
        """Return a YAML file for ``accelerate launch --config_file``.

        It contains the configuration as JSON text, which accelerate accepts in place of a file's
        path, because accelerate's own keys say few settings, and its launcher loses some of them.
        """
        self._settle_inside("accelerate")
        self._settle_precision(f"accelerate rejects mixed_precision together with a {FILE}")
        if all(self.config.get(key) is None for key in _BATCH_SIZES):
            self.config = dict.fromkeys((*_BATCH_SIZES, STEPS), AUTO) | self.config
            reason = "DeepSpeed needs a batch size; accelerate takes the script's"
            self.decide(_BATCH_SIZES[0], None, AUTO, reason)
        block = {FILE: self._config_text()}
        refuse_long_yaml(block[FILE], key=f"{BLOCK}.{FILE}")
        content: dict[str, Any] = {"distributed_type": "DEEPSPEED"}
        refused: dict[str, Any] = {}
        for key, value in self.launched.items():
            row = launch_setting(key)
            place = {"block": block, "top": content}.get(row.place or "", refused)
            if key == "mixed_precision":
                refused[key] = value
            elif not row.is_origin:
                place[key] = value
        self._drop(refused, "accelerate rejects it there")
        content[BLOCK] = block
        return PlanDocument(format="accelerate", text=_yaml(content), decisions=self.decisions)

    def _config_text(self) -> str:
        # accelerate fails without this section; for DeepSpeed an empty section is like none.
        config = {"zero_optimization": {}, **self._in_order()}
        if self.launched.get("num_machines") in (None, 1):
            return _Readable(json.dumps(config, indent=2, allow_nan=False) + "\n")
        text = json.dumps(config, separators=(",", ":"), allow_nan=False)
        for char in _UNSAFE:
            text = text.replace(char, f"\\u{ord(char):04x}")
        return text


def _write_with_backup(path: Path, text: str) -> Path | None:
    """Write ``text`` and keep a copy of the previous content, unless it is equal."""
    content = text.encode()
    try:
        before = path.read_bytes() if path.exists() else None
    except OSError as error:
        raise PlanFileError(
            f"cannot be read ({error.strerror or error})",
            "choose a readable and writable file",
            str(path),
        ) from error
    if before == content:
        return None
    backup = None
    if before is not None:
        backup = write_whole(path.with_name(f"{path.name}.bak"), before)
    write_whole(path, content)
    return backup


# -- A plan as the YAML of ``accelerate config``.
#
# The plan is JSON text under ``deepspeed_config_file``, which accelerate accepts in place of a
# path; so one file is enough.


_UNSAFE: Final = " ;<>"
"""Characters that make accelerate drop an environment variable instead of passing it to other
machines (``convert_dict_to_env_variables``)."""


class _Readable(str):
    """Text that is written to YAML as a block of lines."""

    __slots__ = ()


def _yaml(content: dict[str, Any]) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, _data: Any) -> bool:
            return True

    Dumper.add_representer(
        _Readable,
        lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|"),
    )
    return str(yaml.dump(content, Dumper=Dumper, sort_keys=False, width=100))
