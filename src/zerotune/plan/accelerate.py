"""Read settings from ``accelerate config`` as a plan.

Each key has the same effect as in ``accelerate launch`` and ``DeepSpeedPlugin`` of accelerate 1.15
(``utils/launch.py``, ``utils/dataclasses.py``). Settings that accelerate would discard are kept,
and a decision records each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from zerotune.decisions import Log
from zerotune.errors import (
    REMOVAL,
    InvalidValueError,
    PlanConflictError,
    UnknownKeyError,
    ZeroTuneError,
)
from zerotune.plan.keys import PLACES
from zerotune.plan.launch_settings import FILE, IN_BLOCK, LAUNCH_SETTINGS, STEPS, launch_setting
from zerotune.plan.section import Section, put_setting, unknown_key
from zerotune.plan.sections import LaunchSection, ZeroSection
from zerotune.plan.settings import Settings, read_launch
from zerotune.plan.source import read_named, tolerated
from zerotune.plan.values import AUTO, Choice, Integer

BLOCK = "deepspeed_config"
DEFAULT_STAGE = 2
"""ZeRO stage that ``DeepSpeedPlugin`` uses if none is set."""
OF_THE_SCRIPT: Final = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    STEPS,
    "gradient_clipping",
)
"""DeepSpeed settings that accelerate takes from the script if the ``deepspeed_config`` block does
not set them."""
BLOCK_KEYS: Final = IN_BLOCK | PLACES.keys()
"""Keys that accelerate reads inside the ``deepspeed_config`` block."""


def is_accelerate(content: Mapping[Any, Any]) -> bool:
    """Whether a mapping has the structure of accelerate's YAML, not that of a trainer's file."""
    return BLOCK in content and ("distributed_type" in content or "compute_environment" in content)


def device_list(ids: Any) -> str:
    """Return ``gpu_ids`` as the text that accelerate's launcher needs, such as ``"0,1"``."""
    return ",".join(map(str, ids if isinstance(ids, list) else [ids]))


WITHOUT_DEEPSPEED = (
    "accelerate would train without DeepSpeed, so the plan uses stage 0, which neither partitions "
    "nor offloads"
)
_LAUNCHABLE: Final = {
    "mixed_precision": ("launch.mixed_precision", Choice(choices=("no", "fp16", "bf16", "fp8"),
                                                         unoffered=("fp8",))),
    "zero_stage": ("zero_optimization.stage", Integer(maximum=3, auto=False)),
}  # fmt: skip
"""Settings whose values accelerate's launcher checks: place in a plan, and accepted kind."""


@attrs.frozen(kw_only=True)
class Translated:
    """accelerate's settings, translated to DeepSpeed's keys for ``zerotune.plan.read``."""

    config: Mapping[str, Any]
    """DeepSpeed configuration, before it is read as a plan."""
    launch: LaunchSection
    """Launch settings."""
    source: str
    """Origin of ``config``, for messages."""
    folder: Path | None
    """Folder in which relative paths in ``config`` are looked up first."""


def translate(
    content: Mapping[Any, Any],
    log: Log,
    *,
    source: str,
    folder: Path | None = None,
) -> Translated:
    """Translate settings from ``accelerate config`` to DeepSpeed's keys.

    Args:
        content: The settings as a mapping.
        log: Log for decisions about changed spellings and about settings that accelerate would
            discard.
        source: Origin of the settings, for messages.
        folder: Folder in which a relative ``deepspeed_config_file`` is looked up first.
    """
    block, written = content.get(BLOCK), content.get("distributed_type")
    off = written in (None, False) and "distributed_type" in content  # YAML reads NO as false
    if off or (isinstance(written, str) and written.upper() != "DEEPSPEED"):
        raise InvalidValueError(
            f"{source} configures training without DeepSpeed",
            "choose DeepSpeed in `accelerate config`"
            + ("; zero_stage 3 shards like FULL_SHARD" if str(written).upper() == "FSDP" else ""),
            "distributed_type",
            written,
        )
    if not isinstance(block, Mapping):
        raise InvalidValueError(
            f"{source} has no DeepSpeed settings",
            f"add a {BLOCK} block with a zero_stage, or choose DeepSpeed in `accelerate config`",
            BLOCK,
            block,
        )
    around = {key: value for key, value in content.items() if key != BLOCK}
    translation = _Translation(around=around, block=block, source=source, folder=folder, log=log)
    return translation.translated()


@attrs.define(kw_only=True)
class _Translation:
    """Translation of accelerate's settings."""

    around: dict[Any, Any]
    """Settings outside the block."""
    block: Mapping[Any, Any]
    source: str
    folder: Path | None
    log: Log

    def translated(self) -> Translated:
        self.log.names.update(self._names())
        self.around = _launchable(self.around, self.log)
        self.block = _launchable(self.block, self.log)
        launched, config, source, folder = self._split()
        self.around = self._known()
        self.log.attempt(self._use_deepspeed)
        if self._names_file():
            self._note_precision_beside_file()
        return Translated(
            config=config,
            launch=read_launch({**self.around, **launched}, self.log),
            source=source or self.source,
            folder=folder or self.folder,
        )

    def _names(self) -> dict[str, str]:
        """Return accelerate's name of each setting, by its path in a plan."""

        def name(key: str, *, inside: bool) -> str:
            return f"{BLOCK}.{key}" if inside else key

        names = {f"launch.{key}": name(key, inside=key in IN_BLOCK) for key in LAUNCH_SETTINGS}
        if self._names_file():
            return names
        for key, path in PLACES.items():
            # Messages name keys of an offload section without the enclosing section.
            short = path.removeprefix("zero_optimization.")
            for shown in (path, short if "." in short else path):
                names[shown] = name(key, inside=True)
        own = {key: f"{BLOCK}.{key}" for key in self.block if key in plan_keys()}
        if "zero_optimization" in own:
            names = {path: name for path, name in names.items() if not path.startswith("zero_")}
        return {**names, **own}

    def _default_stage(self, zero: dict[str, Any]) -> None:
        if "stage" not in zero:
            zero["stage"] = DEFAULT_STAGE
            reason = "zero_stage is missing, so accelerate's default is used"
            self.log.decide("zero_optimization.stage", None, DEFAULT_STAGE, reason)

    def _split(self) -> tuple[dict[str, Any], dict[str, Any], str | None, Path | None]:
        """Return launch settings, DeepSpeed configuration, and name and folder of its file."""
        launched = {key: self.block[key] for key in self.block if key in IN_BLOCK}
        config: dict[str, Any] = {}
        for key, path in PLACES.items():
            if not self._names_file():
                put_setting(config, path, self.block.get(key))
        if str(self.block.get(STEPS)).lower() == AUTO:
            self.log.decide(
                STEPS,
                AUTO,
                "kept",
                'accelerate fails to convert "auto" to a number unless the script passes a '
                "gradient_accumulation_plugin; omit the key",
                "warning",
            )
        inline = {key: self.block[key] for key in self.block if key not in BLOCK_KEYS}
        source, inside = None, None
        if self._names_file():
            config, source, inside = self._named_file()
            if inside is None:  # the value contains the settings themselves
                del launched[FILE]
        else:
            launched.pop(FILE, None)
            if "zero_optimization" in config or "zero_optimization" not in inline:
                self._default_stage(config.setdefault("zero_optimization", {}))
            self._lost_by_accelerate()
        if inline:
            for name, value in inline.items():
                self.log.attempt(_merge, config, name, value, self.log)
            self.log.decide(
                BLOCK,
                f"DeepSpeed's own keys {', '.join(map(str, inline))}",
                "kept",
                "accelerate would silently discard these keys",
                "warning",
            )
        if not self._names_file():
            said = {key: value for key, value in config.items() if value is not None}
            config = {**dict.fromkeys(OF_THE_SCRIPT, AUTO), **said}
        return launched, config, source, inside

    def _named_file(self) -> tuple[dict[str, Any], str, Path | None]:
        self.log.attempt(self._refuse_beside_file)
        key, written = f"{BLOCK}.{FILE}", self.block[FILE]
        config, source, inside = read_config_file(written, self.folder, key, self.log)
        if inside is not None:
            is_itself = Path(source).resolve() == Path(self.source).resolve()
            if is_itself or is_accelerate(config):
                raise InvalidValueError(
                    "names this file itself" if is_itself else "names another accelerate file",
                    "write the path of a JSON file with a DeepSpeed configuration, or use "
                    "zero_stage instead",
                    key,
                    written,
                )
        return config, source, inside

    def _names_file(self) -> bool:
        return self.block.get(FILE) not in (None, "none", "")

    def _refuse_beside_file(self) -> None:
        beside = sorted(key for key in self.block if key in PLACES)
        if beside:
            raise PlanConflictError(
                "accelerate rejects these settings together with a configuration file: "
                f"{', '.join(beside)}",
                "move these settings to the file",
                f"{BLOCK}.{FILE}",
                self.block[FILE],
            )

    def _lost_by_accelerate(self) -> None:
        clipping = self.block.get("gradient_clipping")
        if isinstance(clipping, int | float) and clipping == 0:
            self.log.decide(
                "gradient_clipping",
                clipping,
                0,
                "accelerate treats 0 as missing, so DeepSpeed would clip at its default "
                "norm; zerotune does not clip",
                "warning",
            )

    def _use_deepspeed(self) -> None:
        written = self.around.get("distributed_type")
        if isinstance(written, str):
            return
        if written is not None:
            raise InvalidValueError("must be text", "write DEEPSPEED", "distributed_type", written)
        self.around["distributed_type"] = "DEEPSPEED"
        self.log.decide(
            "launch.distributed_type",
            None,
            "DEEPSPEED",
            "accelerate rejects a file without distributed_type; zerotune reads the file "
            f"because it contains {BLOCK}",
            "warning",
        )

    def _note_precision_beside_file(self) -> None:
        written = self.around.get("mixed_precision")
        if written is not None:
            self.log.decide(
                "launch.mixed_precision",
                written,
                "kept",
                f"accelerate rejects mixed_precision together with a {FILE} unless "
                '--mixed_precision is also given; zerotune uses this value in place of "auto"',
                "warning",
            )

    def _known(self) -> dict[Any, Any]:
        """Return the known settings outside the block; record those that accelerate rejects."""
        passed = {f"launch.{name}" for name in LaunchSection.known_names()} | self.log.also_known
        kept: dict[Any, Any] = {}
        for key, value in self.around.items():
            name = key if isinstance(key, str) else repr(key)
            if f"launch.{name}" not in passed:
                self.log.refuse(unknown_key(Settings, name, value, name, LAUNCH_SETTINGS))
                continue
            kept[key] = value
            if launch_setting(name).place != "top":
                self.log.decide(
                    f"launch.{name}",
                    value,
                    "kept",
                    f"accelerate rejects this key outside {BLOCK}",
                    "warning",
                )
        return kept


def _launchable(settings: Mapping[Any, Any], log: Log) -> dict[Any, Any]:
    """Return the settings that accelerate's launcher accepts; record errors for the others."""
    kept = dict(settings)
    for key, (path, kind) in _LAUNCHABLE.items():
        value = settings.get(key)
        if value is None:
            continue
        if isinstance(value, bool) and key == "mixed_precision":
            why = "YAML reads an unquoted no as false, which accelerate rejects; write 'no'"
            log.decide(path, value, "no", why, "warning")
            continue
        try:
            kind.read(value, path)
        except ZeroTuneError as error:
            del kept[key]
            if key == "zero_stage":  # or its default would be reported too
                kept[key] = DEFAULT_STAGE
            log.refuse(error)
    return kept


def read_config_file(
    written: Any, folder: Path | None, key: str, log: Log
) -> tuple[dict[str, Any], str, Path | None]:
    """Return the content, name and folder of a ``deepspeed_config_file``."""
    if not isinstance(written, str):
        raise InvalidValueError("must be a path", "write a path", key, written)
    named = read_named(written, folder, key=key)
    tolerated(named.sentences, named.source, log)
    if not isinstance(named.value, Mapping):
        raise InvalidValueError(
            "must name a file that contains a DeepSpeed configuration",
            "write a JSON object to that file",
            key,
            written,
        )
    return dict(named.value), named.source, named.folder


def _merge(merged: dict[str, Any], key: Any, value: Any, log: Log) -> None:
    if not isinstance(key, str):
        raise InvalidValueError("has a key that is not text", "put it in quotes", BLOCK, key)
    if key not in plan_keys() and key not in log.also_known:
        if key in ZeroSection.known_names():
            raise UnknownKeyError(
                "accelerate silently discards this key of zero_optimization",
                f"write the configuration as JSON, and set {FILE} to its path",
                f"{BLOCK}.{key}",
                value,
                edits=[REMOVAL],
            )
        raise unknown_key(Section, key, value, f"{BLOCK}.{key}", BLOCK_KEYS | plan_keys())
    if key in merged and merged[key] != value:
        raise PlanConflictError(
            "is set under accelerate's key and under DeepSpeed's key, with different values",
            "keep one of the two keys",
            f"{BLOCK}.{key}",
            value,
        )
    merged[key] = value


def plan_keys() -> frozenset[str]:
    """Return all top-level keys of a DeepSpeed configuration, including aliases."""
    return Settings.known_names()
