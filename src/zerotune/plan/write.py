"""Write plans as DeepSpeed's JSON, accelerate's YAML, trainers' files or Python."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from pprint import pformat
from textwrap import indent
from typing import Any, Final

import attrs

from zerotune._util.files import sync, write_atomically
from zerotune._util.text import as_number, as_texts, did_you_mean, is_integer, is_number
from zerotune.decisions import Decision, Log
from zerotune.errors import InvalidValueError, PlanFileError, PlanSyntaxError
from zerotune.plan.accelerate import (
    FILE,
    GATHER,
    LAUNCH_IN_BLOCK,
    OF_THE_SCRIPT,
    TOP_LEVEL,
    device_list,
    is_accelerate,
)
from zerotune.plan.keys import STARTING
from zerotune.plan.section import evolved, modelled
from zerotune.plan.sections import FP16_BESIDE, PRECISIONS, Bf16Section, LaunchSection
from zerotune.plan.settings import Settings, SettingsT, passed_paths
from zerotune.plan.source import (
    INIT_FLAG,
    MICRO_KEYS,
    TRAINER_KEYS,
    is_off,
    parse_json,
    read_named,
    read_text,
    refuse_long_yaml,
    undashed,
    wrapper_of,
)
from zerotune.plan.trainer import flagged_precision, precision_flags
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
            key=os.fspath(path),
            fix="choose a file in a writable folder",
        ) from error
    return Path(path)


FORMATS: Final = ("deepspeed", "accelerate", "trainer", "python")
_YAML_SUFFIXES: Final = (".yaml", ".yml")


@attrs.frozen(kw_only=True)
class PlanDocument:
    """A plan as text, with the decisions that the format required."""

    format: str
    """``"deepspeed"``, ``"accelerate"``, ``"trainer"`` or ``"python"``."""
    text: str
    decisions: tuple[Decision, ...] = attrs.field(default=(), converter=as_tuple)
    """Decisions about settings that are written in a different form or dropped."""
    beside: Mapping[Path, str] = attrs.field(factory=dict)
    """Content of other files to which the text refers, by path."""


@attrs.frozen(kw_only=True)
class SavedPlan:
    """Result of saving a plan."""

    format: str
    paths: tuple[Path, ...]
    """Files that contain the plan."""
    backups: tuple[Path, ...]
    """Copies of the replaced files; empty if nothing changed."""
    decisions: tuple[Decision, ...]
    """Decisions, as in ``PlanDocument``."""


def plan_document(
    plan: Settings,
    format: str = "deepspeed",  # noqa: A002
    *,
    existing: Path | None = None,
    lossy: Collection[str] = (),
    like: Mapping[str, Any] | None = None,
) -> PlanDocument:
    """Convert a plan to text in the given format; reading the text gives an equivalent plan.

    If the format has other names for settings, those names are written.

    Args:
        plan: The plan.
        format: ``"deepspeed"`` (its JSON), ``"accelerate"`` (YAML), ``"trainer"`` (a
            ``config.json`` that contains ``deepspeed_config``) or ``"python"`` (a script).
        existing: A trainer's file whose other content is preserved.
        lossy: Launch settings that may be dropped if the format does not support them. Settings
            that only affect how processes start are always dropped; a decision records this.
            ``"num_processes"`` must be listed if the batch size per rank depends on it.
        like: A configuration that determines the order of keys in JSON output; by default the order
            of the plan's fields.

    Raises:
        InvalidValueError: The format is unknown, ``lossy`` contains a name that is not a launch
            setting, or a launch setting is neither supported by the format nor named in ``lossy``.
        PlanError: ``existing`` cannot be read or is not a JSON object.
    """
    writer = _Writer(plan=plan, lossy=_launch_settings(plan, lossy), like=like or {})
    if format == "deepspeed":
        return writer.deepspeed()
    if format == "accelerate":
        return writer.accelerate()
    if format == "trainer":
        return writer.trainer(existing)
    if format == "python":
        text = f"from zerotune.plan import DeepSpeedPlan\n\nplan = {python_expression(plan)}\n"
        return PlanDocument(format=format, text=text)
    raise InvalidValueError(
        "is not a supported format for plans",
        key="format",
        value=format,
        fix="use one of " + ", ".join(repr(name) for name in FORMATS),
    )


def _launch_settings(plan: Settings, names: Collection[str]) -> frozenset[str]:
    """Return the launch settings that ``names`` names, each with or without ``launch.``."""
    settings = {name: name.strip().removeprefix("launch.") for name in as_texts(names)}
    written = plan.launch.to_dict() if plan.launch else {}
    modelled_here = {attribute.name for attribute in modelled(LaunchSection)}
    known = TOP_LEVEL | LAUNCH_IN_BLOCK | modelled_here | written.keys()
    for name, setting in settings.items():
        if setting not in known:
            close = did_you_mean(setting, sorted(known)) or ["num_processes", "gpu_ids"]
            raise InvalidValueError(
                "is not a launch setting",
                key="lossy",
                value=name,
                fix=f"use names such as {', '.join(close)}",
            )
    return frozenset(settings.values())


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
    like: Mapping[str, Any] | None = None,
) -> SavedPlan:
    """Write a plan to a file as ``DeepSpeedPlan.save`` does."""
    target = Path(path)
    format = format or format_of(target)  # noqa: A001
    existing = target if format == "trainer" and target.exists() else None
    document = plan_document(plan, format, existing=existing, lossy=lossy, like=like)
    files = {**document.beside, target: document.text}
    backups = [_write_with_backup(each, text) for each, text in files.items()]
    return SavedPlan(
        format=format,
        paths=tuple(files),
        backups=tuple(backup for backup in backups if backup is not None),
        decisions=document.decisions,
    )


def format_of(path: Path) -> str:
    """Return the format in which to write ``path``, based on its suffix or the existing file."""
    suffix = path.suffix.lower()
    if suffix in _YAML_SUFFIXES:
        return "accelerate"
    if suffix == ".py":
        return "python"
    if not path.exists():
        return "deepspeed"
    try:
        content, _ = parse_json(read_text(path), source=str(path))
    except PlanSyntaxError:
        return "deepspeed"
    if not isinstance(content, Mapping) or wrapper_of(content) is None:
        return "deepspeed"
    if is_accelerate(content):
        raise PlanFileError(
            "contains accelerate's settings as JSON, which zerotune can read but not write",
            key=str(path),
            fix="save to a .yaml file, or pass a format",
        )
    return "trainer"


def in_order(config: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Sort the keys of ``config`` as in ``like``; keys that are not in ``like`` come last."""
    names = [name for name in like if name in config]
    ordered = {name: config[name] for name in (*names, *config)}
    for name in names:
        inside, other = ordered[name], like[name]
        if isinstance(inside, Mapping) and isinstance(other, Mapping):
            ordered[name] = in_order(inside, other)
    return ordered


# -- Settings that a format does not support.


_WHERE_READ: Final = ("distributed_type", FILE)
"""Launch settings that only describe the origin of the plan."""
_UNSAID: Final[Mapping[str, Any]] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "downcast_bf16": False,
    "dynamo_backend": False,
    "enable_cpu_affinity": False,
    "deepspeed_multinode_launcher": "standard",
    "fp16": False,
    "fsdp_config": {},
    "machine_rank": 0,
    "main_process_ip": "",
    "main_training_function": "main",
    "megatron_lm_config": {},
    "num_machines": 1,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}
"""Values that ``accelerate config`` writes by default, by launch setting; ``False`` also stands for
an unquoted "no" in YAML."""
_LAUNCHER_SETTINGS: Final = STARTING | {
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "num_machines",
    "num_processes",
}
"""Settings that only affect how processes are started, not how a plan is resolved."""


@attrs.define(kw_only=True)
class _Writer(Log):
    """Conversion of a plan to a format, with its decisions."""

    plan: Settings
    lossy: frozenset[str] = frozenset()
    like: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        """The configuration, with its keys in the order of ``like``."""
        return in_order(self.plan.to_dict(), self.like)

    @property
    def launched(self) -> dict[str, Any]:
        """Settings of the launcher."""
        return self.plan.launch.to_dict() if self.plan.launch else {}

    def deepspeed(self) -> PlanDocument:
        """Return DeepSpeed's JSON; training settings of a launcher's file get DeepSpeed's keys."""
        where = "DeepSpeed's own configuration"
        self._settle_inside(where)
        self._settle_precision(f"{where} sets the precision itself")
        launched, config = self._launch_settings(), self.config
        if INIT_FLAG in launched and not self._says_nothing(INIT_FLAG, launched[INIT_FLAG]):
            flag = config[INIT_FLAG] = launched.pop(INIT_FLAG)
            if not flag:  # True is accelerate's default at stage 3.
                reason = "accelerate ignores this key here; launch with --zero3_init_flag false"
                self.decide(f"launch.{INIT_FLAG}", flag, flag, reason, "warning")
        text = _json(config, indent=2)
        self._drop_rest(launched, f"{where} does not support this setting")
        return PlanDocument(format="deepspeed", text=text, decisions=self.decisions)

    def _launch_settings(self) -> dict[str, Any]:
        return {key: value for key, value in self.launched.items() if key not in _WHERE_READ}

    def _drop_rest(self, left: Mapping[str, Any], why: str) -> None:
        """Record each dropped setting; raise an error if ``lossy`` does not allow it."""
        parts = (self.plan.train_micro_batch_size_per_gpu, self.plan.gradient_accumulation_steps)
        shares = is_integer(self.plan.train_batch_size) and not all(map(is_integer, parts))
        # The number of processes is needed to compute the batch sizes.
        starting = _LAUNCHER_SETTINGS - {"num_processes"} if shares else _LAUNCHER_SETTINGS
        unsaid = {key: value for key, value in left.items() if self._says_nothing(key, value)}
        starts = [
            key for key in left if key in starting and key not in self.lossy and key not in unsaid
        ]
        lost = {key: value for key, value in left.items() if key not in (*unsaid, *starts)}
        refused = [key for key in lost if key not in self.lossy]
        if refused:
            others = f" (nor {', '.join(refused[1:])})" if refused[1:] else ""
            names = ",".join(lost)
            known = (TOP_LEVEL | LAUNCH_IN_BLOCK) - {"mixed_precision"}
            keep = (
                "use accelerate's format, which supports it, or "
                if known.issuperset(refused)
                else ""
            )
            raise InvalidValueError(
                f"{why}{others}",
                key=f"launch.{refused[0]}",
                value=lost[refused[0]],
                fix=f"{keep}allow dropping it: lossy={names.split(',')}",
                shell_fix=f"{keep}allow dropping it: --lossy {names}",
            )
        started = "the setting only affects how processes are launched; pass it to the launcher"
        for key, value in lost.items():
            self.decide(f"launch.{key}", value, None, why, "warning")
        for key in starts:
            self.decide(f"launch.{key}", left[key], None, started)
        for key in unsaid:
            self.decide(f"launch.{key}", left[key], None, "it is the launcher's default")

    def _says_nothing(self, key: str, value: Any) -> bool:
        if key == INIT_FLAG:
            return self.plan.stage in (0, 1, 2)
        if key == "dynamo_config" and isinstance(value, Mapping):
            key, value = "dynamo_backend", value.get("dynamo_backend")
        if value is None or value in ({}, []):
            return True
        if isinstance(value, str) and value.strip().lower() == "no":
            value = False
        return key in _UNSAID and _UNSAID[key] == value and type(_UNSAID[key]) is type(value)

    def _settle_inside(self, where: str) -> None:
        """Move settings from beside the configuration into the configuration."""
        self._settle_batch(where)
        if self.plan.launch is not None:
            self._settle_swap_folders(self.plan.launch, where)
            self._settle_automatic_precision(where)

    def _settle_batch(self, where: str) -> None:
        """Move batch and clipping settings of the launcher into the configuration."""
        for key in ("gradient_accumulation_steps", "gradient_clipping"):
            launched = getattr(self.plan.launch, key) if self.plan.launch else None
            if self.plan.launch is None or launched is None:
                continue
            written, after = getattr(self.plan, key), None
            self.plan = evolved(self.plan, launch=evolved(self.plan.launch, **{key: None}))
            sizes = (self.plan.train_batch_size, self.plan.train_micro_batch_size_per_gpu)
            is_open = written in (None, AUTO)
            if key == "gradient_accumulation_steps" and is_open and all(map(is_integer, sizes)):
                reason = "the value follows from the two batch sizes, so it is redundant"
            elif is_open:
                self.plan, after = evolved(self.plan, **{key: launched}), launched
                reason = f"{where} has only one key for this setting, so it is written as {key}"
            else:
                kept = f"{key} = {written} takes precedence"
                reason = f"{where} has only one key for this setting, and {kept}"
            self.decide(f"launch.{key}", launched, after, reason)

    def _settle_swap_folders(self, launch: LaunchSection, where: str) -> None:
        """Write a trainer's swap folders as ``nvme_path``, over which they take precedence."""
        folders = {
            "param": launch.offload_param_path,
            "optimizer": launch.offload_optimizer_path or launch.offload_param_path,
        }
        for part, folder in folders.items():
            zero = self.plan.zero_optimization
            section = getattr(zero, f"offload_{part}") if zero else None
            if zero is None or folder is None or section is None or section.device != "nvme":
                continue
            inside = evolved(section, nvme_path=folder)
            self.plan = evolved(
                self.plan, zero_optimization=evolved(zero, **{f"offload_{part}": inside})
            )
            reason = f"{where} names it nvme_path"
            path = f"zero_optimization.offload_{part}.nvme_path"
            self.decide(path, section.nvme_path, folder, reason)
        for name in ("offload_param_path", "offload_optimizer_path"):
            written = getattr(launch, name)
            if written is not None:
                reason = f"{where} has swap folders only for parts that are offloaded to NVMe"
                self.decide(f"launch.{name}", written, None, reason)
        bare = evolved(launch, offload_param_path=None, offload_optimizer_path=None)
        self.plan = evolved(self.plan, launch=bare)

    def _settle_automatic_precision(self, where: str) -> None:
        launch = self.plan.launch
        if launch is None or launch.mixed_precision != AUTO:
            return
        self.plan = evolved(self.plan, launch=attrs.evolve(launch, mixed_precision=None))
        reason = f"{where} does not support this setting"
        bf16 = self.plan.bf16.enabled if self.plan.bf16 else None
        fp16 = self.plan.fp16.enabled if self.plan.fp16 else None
        if bf16 is None and fp16 not in (True, AUTO):
            self.plan = evolved(
                self.plan, bf16=evolved(self.plan.bf16 or Bf16Section(), enabled=AUTO)
            )
            reason += (
                '; with bf16.enabled = "auto", zerotune chooses the precision, '
                "but accelerate uses fp32"
            )
        self.decide("launch.mixed_precision", AUTO, None, reason, "warning")

    def _settle_precision(self, why: str) -> None:
        """Move the precision into the configuration; fp8 stays outside."""
        launch = self.plan.launch
        asked = launch.mixed_precision if launch else None
        if launch is None or asked is None:
            return
        written = {
            "bf16": self.plan.bf16.enabled if self.plan.bf16 else None,
            "fp16": self.plan.fp16.enabled if self.plan.fp16 else None,
        }
        stands = True in written.values() or written.get(asked) is False
        if not stands and asked not in PRECISIONS:
            return
        self.plan = evolved(self.plan, launch=attrs.evolve(launch, mixed_precision=None))
        if written.get(asked) is True:
            reason = f"{why}: {asked}.enabled is true"
            self.decide("launch.mixed_precision", asked, None, reason)
            return
        if stands:
            reason = f"{why}; the precision in the configuration takes precedence"
            self.decide("launch.mixed_precision", asked, None, reason, "warning")
            return
        for name, beside in (("bf16", Bf16Section()), ("fp16", FP16_BESIDE)):
            if name == asked or written[name] == AUTO:
                section = getattr(self.plan, name) or beside
                self.plan = evolved(self.plan, **{name: evolved(section, enabled=name == asked)})
        reason = f"{why}: bf16.enabled and fp16.enabled are written instead"
        self.decide("launch.mixed_precision", asked, None, reason)

    def accelerate(self) -> PlanDocument:
        """Return a YAML file for ``accelerate launch --config_file``.

        A plan is written in accelerate's keys if it has only a stage, CPU offload, accumulation,
        clipping above 0, and saving of 16-bit weights. A plan with NVMe folders is written as JSON
        text under ``deepspeed_config_file``, because ``accelerate launch`` does not pass such
        folders on.
        """
        self._settle_inside("accelerate")
        written = self.plan.launch.distributed_type if self.plan.launch else None
        # The plan comes from a file that does not train with DeepSpeed.
        other = written is not None and written.upper() != "DEEPSPEED" and not self.plan.to_dict()
        without = written if other else None
        block = {} if without else self._as_block()
        refused: dict[str, Any] = {}
        content: dict[str, Any] = {"distributed_type": without or "DEEPSPEED"}
        launched = self.launched
        if block is None:
            self._settle_precision(f"accelerate rejects mixed_precision together with a {FILE}")
            block = {FILE: self._config_text()}
            refuse_long_yaml(block[FILE], key=f"deepspeed_config.{FILE}")
            launched = self.launched
            if "mixed_precision" in launched:
                refused["mixed_precision"] = launched.pop("mixed_precision")
        elif block:
            open_keys = [key for key in OF_THE_SCRIPT if getattr(self.plan, key) is None]
            if open_keys:
                reason = "accelerate takes missing keys from the script"
                reason = f"{reason}: {', '.join(open_keys)}"
                self.decide(open_keys[0], None, AUTO, reason)
        for key, value in launched.items():
            if key in _WHERE_READ:
                continue
            if key in LAUNCH_IN_BLOCK and not without:  # else accelerate ignores the block
                block[key] = value
            elif key in TOP_LEVEL:
                content[key] = "no" if (key, value) == ("mixed_precision", "fp32") else value
            else:
                refused[key] = value
        self._drop_rest(refused, "accelerate rejects it there")
        content["deepspeed_config"] = block
        return PlanDocument(format="accelerate", text=_yaml(content), decisions=self.decisions)

    def _as_block(self) -> dict[str, Any] | None:
        """Return the plan in accelerate's keys, or ``None`` if these keys are not sufficient."""
        config = self.plan.to_dict()
        zero = config.pop("zero_optimization", {})
        # If accumulation is not set, a configuration means 1, but a block the script's value.
        steps = self.plan.gradient_accumulation_steps
        one_step = steps is None and self.plan.train_micro_batch_size_per_gpu is not None
        # accelerate reads missing keys as "auto", so "auto" is not written.
        said = {key: config.pop(key, AUTO) for key in OF_THE_SCRIPT}
        said = {key: value for key, value in said.items() if value != AUTO}
        accumulation = said.pop("gradient_accumulation_steps", None)
        clipping = said.pop("gradient_clipping", None)
        stage, gather = zero.pop("stage", None), zero.pop(GATHER, None)
        devices = {part: zero.pop(f"offload_{part}", None) for part in ("optimizer", "param")}
        # Clipping of 0 would be lost: accelerate drops it, and DeepSpeed clips by default.
        sayable = (
            not config
            and not said
            and not one_step
            and not zero
            and is_integer(stage)
            and (accumulation is None or is_integer(accumulation))
            and (clipping is None or (is_number(clipping) and clipping > 0))
            and isinstance(gather, bool | None)
            and all(
                section in (None, {"device": "none"}, {"device": "cpu"})
                for section in devices.values()
            )
        )
        if not sayable:
            return None
        block = {
            "zero_stage": stage,
            **{
                f"offload_{part}_device": section["device"]
                for part, section in devices.items()
                if section is not None
            },
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": clipping,
            "zero3_save_16bit_model": gather,
        }
        return {key: value for key, value in block.items() if value is not None}

    def _config_text(self) -> str:
        # accelerate fails without this section; for DeepSpeed an empty section is like none.
        config = {"zero_optimization": {}, **self.plan.to_dict()}
        machines = self.plan.launch.num_machines if self.plan.launch else None
        if machines is None or machines == 1:
            return _Readable(json.dumps(config, indent=2, allow_nan=False) + "\n")
        text = json.dumps(config, separators=(",", ":"), allow_nan=False)
        for char in _UNSAFE:
            text = text.replace(char, f"\\u{ord(char):04x}")
        return text

    def trainer(self, existing: Path | None) -> PlanDocument:
        """Return a trainer's file that contains the plan.

        Other content of ``existing`` is preserved. The configuration keeps its form (an object,
        JSON text, or the path of a file) and its key, with or without dashes. Precision,
        accumulation and clipping in the trainer's file change only if the plan has different
        values.
        """
        text = None if existing is None else read_text(existing)
        before, sentences = ({}, []) if text is None else parse_json(text, source=str(existing))
        if not isinstance(before, Mapping):
            raise InvalidValueError(
                f"{existing} must contain an object",
                value=before,
                fix="choose a trainer's config.json, or a new file",
            )
        content = dict(before)
        wrapper = wrapper_of(content) or _WRAPPER
        beside = self._put_config(content, wrapper, existing)
        dashes = wrapper[: len(wrapper) - len(undashed(wrapper))]
        left = self._put_launch(content, dashes)
        self._drop_rest(left, "a trainer's file does not support this setting")
        if text is None or content != before:
            text = _json(content, indent=2)
            if sentences:
                reason = "JSON cannot represent these parts, so only the .bak file contains them"
                self.decide(str(existing), "; ".join(sentences), None, reason, "warning")
        return PlanDocument(format="trainer", text=text, decisions=self.decisions, beside=beside)

    def _put_config(
        self, content: dict[str, Any], wrapper: str, existing: Path | None
    ) -> dict[Path, str]:
        """Put the configuration into ``content``; return the files to which it refers."""
        config = self.config
        if self.plan.launch is not None and self.plan.launch.zero3_init_flag is not None:
            config[INIT_FLAG] = self.plan.launch.zero3_init_flag
        written = content.get(wrapper)
        if isinstance(written, Mapping) and isinstance(written.get(FILE), str):
            block = {key: value for key, value in written.items() if key != INIT_FLAG}
            content[wrapper] = block
            return self._put_config(block, FILE, existing)
        if not isinstance(written, str) or is_off(written):
            content[wrapper] = config
            return {}
        is_text = written.lstrip().startswith("{")
        folder = existing.parent if existing is not None else None
        named = None if is_text else read_named(written, folder, key=wrapper)
        # JSON text replaces base64, because it is readable.
        if named is None or named.folder is None:
            content[wrapper] = _json(config, indent=None).rstrip()
            return {}
        return {Path(named.source): _json(config, indent=2)}

    def _put_launch(self, content: dict[str, Any], dashes: str) -> dict[str, Any]:
        """Put the launch settings into ``content``; return those that it does not support."""
        launched = self._launch_settings()
        launched.pop(INIT_FLAG, None)  # it is in the configuration
        micro, reason = self.plan.train_micro_batch_size_per_gpu, "set by the plan"
        for key in [key for key in content if undashed(key) in MICRO_KEYS]:
            if is_integer(micro) and as_number(content[key]) != micro:
                self.decide(key, content[key], micro, reason)
                content[key] = micro
        flags = precision_flags(content)
        if flags:
            launched.pop("mixed_precision", None)
            asked = "no" if self.plan.precision == "fp32" else self.plan.precision
            before = flagged_precision(content)
            if before != asked:
                self.decide(", ".join(flags.values()), before, asked, reason)
                same = AUTO if asked == AUTO else None
                content.update({key: same or name == asked for name, key in flags.items()})
        for setting, new_key in _NEW_KEYS.items():
            if setting not in launched:
                continue
            value = launched.pop(setting)
            value = "no" if value == "fp32" else value
            present = [key for key in content if TRAINER_KEYS.get(undashed(key)) == setting]
            for key in present or [f"{dashes}{new_key}"]:
                if content.get(key) == value and type(content.get(key)) is type(value):
                    continue
                if key in content:
                    self.decide(key, content[key], value, reason)
                content[key] = value
        return launched


def _write_with_backup(path: Path, text: str) -> Path | None:
    """Write ``text`` and keep a copy of the previous content, unless it is equal."""
    content = text.encode()
    try:
        before = path.read_bytes() if path.exists() else None
    except OSError as error:
        raise PlanFileError(
            f"cannot be read ({error.strerror or error})",
            key=str(path),
            fix="choose a readable and writable file",
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
# accelerate's own keys suffice only for small plans. Other plans are written as JSON text under
# ``deepspeed_config_file``, which accelerate accepts in place of a path; so one file is enough.


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


# -- A plan as Python source.


_LINE_WIDTH: Final = 84
_LONGEST_LAID_OUT: Final = 100_000
"""Longer values are not split into lines, because splitting copies them several times."""


def python_expression(plan: Settings, *, width: int = _LINE_WIDTH) -> str:
    """Return Python code that recreates ``plan``; ``DeepSpeedPlan`` is the only name it needs."""
    known = sorted(passed_paths(plan, unknown=True))

    def call(name: str, value: Any, *, launched: bool) -> str:
        passed = [path for path in known if path.startswith("launch.") == launched]
        parts = [repr(value)]
        if len(parts[0]) <= _LONGEST_LAID_OUT:
            parts = [pformat(value, width=width, sort_dicts=False)]
        parts += [f"also_known={passed!r}"] if passed else []
        if len(parts) == 1 and "\n" not in parts[0]:
            return f"{name}({parts[0]})"
        lines = indent(",\n".join(parts), "    ")
        return f"{name}(\n{lines},\n)"

    launch = plan.launch.to_dict() if plan.launch else {}
    return call("DeepSpeedPlan.from_dict", plan.to_dict(), launched=False) + (
        call(".with_overrides", {"launch": launch}, launched=True) if launch else ""
    )


# -- A plan inside a trainer's ``config.json``.


_WRAPPER: Final = "deepspeed_config"
_NEW_KEYS: Final = {
    **{setting: setting for setting in TRAINER_KEYS.values()},
    "gradient_clipping": "max_grad_norm",
}
"""Keys for launch settings that the file does not contain yet."""


def _json(value: Any, *, indent: int | None) -> str:
    return json.dumps(value, indent=indent, allow_nan=False) + "\n"
