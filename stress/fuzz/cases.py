"""Input for the parsers: configurations from the tests, damaged, mixed and made up."""

from __future__ import annotations

import base64
import json
import random
import zlib
from collections.abc import Callable
from typing import Any, Final

import attrs

from tests.plan.conftest import REFERENCE_A, REFERENCE_B, REFERENCE_C
from tests.plan.styles import ACCELERATE, DEEPSPEED, SIMPLETUNER, TRAINERS
from zerotune.plan.keys import TOP_LEVEL, ZERO
from zerotune.plan.launch_settings import LAUNCH_SETTINGS
from zerotune.plan.optimizer.catalogue import OPTIMIZERS
from zerotune.plan.optimizer.schedules import SCHEDULERS
from zerotune.plan.plan import DeepSpeedPlan
from zerotune.plan.section import Section, modelled
from zerotune.plan.sections import (
    AioSection,
    Bf16Section,
    Fp16Section,
    OffloadSection,
    ZeroSection,
)

LONGEST_KEPT: Final = 1000
"""Cases with more characters are stored compressed."""


@attrs.frozen(kw_only=True)
class Case:
    """An input to parse."""

    text: str
    """The file's text; lone surrogates become invalid bytes (``surrogatepass``)."""
    suffix: str = ".json"
    seed: str = ""
    """Determines the operations on the case."""

    def content(self) -> bytes:
        """Return the bytes of the file."""
        return self.text.encode("utf-8", "surrogatepass")

    def to_json(self) -> dict[str, str]:
        """Return the case in the corpus format."""
        kept = {"suffix": self.suffix, "seed": self.seed}
        if len(self.text) <= LONGEST_KEPT and self.text.isascii():
            return {**kept, "text": self.text}
        packed = zlib.compress(self.text.encode("utf-8", "surrogatepass"), 9)
        return {**kept, "packed": base64.b85encode(packed).decode()}

    @classmethod
    def from_json(cls, kept: dict[str, str]) -> Case:
        """Read a case from the corpus format."""
        text = kept.get("text")
        if text is None:
            packed = base64.b85decode(kept["packed"])
            text = zlib.decompress(packed).decode("utf-8", "surrogatepass")
        return cls(text=text, suffix=kept["suffix"], seed=kept["seed"])


# -- Starting points.


FILES: Final = [
    *((text, ".json") for named in (DEEPSPEED, TRAINERS, SIMPLETUNER) for text in named.values()),
    *((json.dumps(one), ".json") for one in (REFERENCE_A, REFERENCE_B)),
    *((text, ".yaml") for text in (*ACCELERATE.values(), REFERENCE_C)),
]
SECTIONS: Final[dict[str, type[Section]]] = {
    "zero_optimization": ZeroSection,
    "offload_optimizer": OffloadSection,
    "offload_param": OffloadSection,
    "bf16": Bf16Section,
    "fp16": Fp16Section,
    "aio": AioSection,
}
KEYS: Final = sorted(
    {
        *TOP_LEVEL, *ZERO, *LAUNCH_SETTINGS, "deepspeed_config", "zero_stage",
        "cpu_offload", "lr", "betas", "warmup_num_steps", "total_num_steps", "max_grad_norm",
        "--mixed_precision", "zero3_save_16bit_model", "<<", "", "a.b", "\x00", "é", "_note",
        *(each.name for each in modelled(DeepSpeedPlan)),
        *(each.name for cls in SECTIONS.values() for each in modelled(cls)),
    }
)  # fmt: skip
VALUES: Final[list[Any]] = [
    None, True, False, 0, 1, 2, 3, 4, 8, -1, 0.0, -0.0, 0.5, 1e-9, 2e8, 1e308, -1e308, 2**31, 2**63,
    -(2**63), 10**30, 10**309, "", " ", "auto", "AUTO", "none", "null", "cpu", "nvme", "CPU",
    "1e-4",
    "0x10", "1_000", "٣", "nan", "inf", "-inf", "true", "no", "dynamic", "bf16", "fp8", "{}", "[]",
    "{{x}}", "${X}", "\x00", "\x1b[2J", "\ud800", "😀", "a" * 200, ".", "/", "..", "~", "/dev/null",
    [], {}, [[]], [None], {"": None}, {"enabled": True}, {"enabled": "auto"}, {"device": "nvme"},
    {"type": "AdamW"}, {"stage": 3}, {"deepspeed_config_file": "case.json"}, [0.9, 0.999],
]  # fmt: skip
TOKENS: Final = [
    "{", "}", "[", "]", ":", ",", '"', "'", "\\", "\\u", "\\ud800", "\\u0000", "//", "/*",
    "*/", "#",
    "\n", "\r", "\t", " ", "\ufeff", "\u2028", "\x00", "é", "😀", "-", "- ", "? ", "&a ",
    "*a", "!!int ",
    "!!python/object:os.system ", "!!set ", "!!omap ", "!!binary ", "!!timestamp ", "<<: ",
    "|", ">", "---", "...",
    "%YAML 1.1", "%TAG ! x", "NaN", "Infinity", "-Infinity", "0x1f", "1e999", "0" * 50, "9" * 400,
    "1:1:1", "2020-01-01", ".inf", ".nan", "~", "yes", "=", "{{", "${", "<", "@", "`", "\udcff",
    "deepspeed_config: ", '"deepspeed_config": ', "auto", "null", "true", "'''", "\ud83d",
]  # fmt: skip


# -- Generators of cases.


def _damaged(chance: random.Random) -> Case:
    """Return a file with characters removed, inserted and swapped."""
    text, suffix = chance.choice(FILES)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        at = chance.randrange(len(text) + 1)
        to = min(len(text), at + chance.choice((0, 1, 1, 2, 8, 40)))
        part = text[at:to]
        new = chance.choice(
            (
                "", part * 2, part[::-1], chance.choice(TOKENS), chance.choice(TOKENS) + part,
                chr(chance.choice((chance.randrange(128), chance.randrange(0xD800)))),
            )
        )  # fmt: skip
        text = text[:at] + new + text[to:]
    return Case(text=text, suffix=suffix)


def _spliced(chance: random.Random) -> Case:
    """Return the beginning of one file followed by the end of another."""
    (one, suffix), (other, _) = chance.choice(FILES), chance.choice(FILES)
    text = one[: chance.randrange(len(one) + 1)] + other[chance.randrange(len(other) + 1) :]
    return Case(text=text, suffix=chance.choice((suffix, ".json", ".yaml", ".hjson")))


def _renamed(chance: random.Random) -> Case:
    """Return a file with the suffix of a different format."""
    return Case(text=chance.choice(FILES)[0], suffix=chance.choice((".json", ".yaml", ".hjson")))


def _value(chance: random.Random, depth: int = 0) -> Any:
    if depth < 3 and chance.random() < 0.25:
        if chance.random() < 0.5:
            return [_value(chance, depth + 1) for _ in range(chance.randrange(4))]
        return {_key(chance): _value(chance, depth + 1) for _ in range(chance.randrange(4))}
    if chance.random() < 0.1:
        return chance.choice((chance.randrange(2**70), chance.random(), chance.gauss(0, 1e5)))
    return chance.choice(VALUES)


def _key(chance: random.Random) -> str:
    key: str = chance.choice(KEYS)
    if chance.random() < 0.05:
        at = chance.randrange(len(key) + 1)
        key = key[:at] + chance.choice("abz_-. 1") + key[at + 1 :]
    return key


def _made_up(chance: random.Random) -> Case:
    """Return a configuration of known keys with plausible values."""
    config = _section(chance, DeepSpeedPlan, TOP_LEVEL)
    for name in ("optimizer", "scheduler"):
        if chance.random() < 0.7:
            known = OPTIMIZERS if name == "optimizer" else SCHEDULERS
            entry = known[chance.choice(list(known))]
            arguments = [*entry.parameter_names, *(["foo"] if chance.random() < 0.1 else [])]
            chosen = chance.sample(arguments, min(len(arguments), chance.randrange(4)))
            config[name] = {
                "type": entry.name,
                "params": {key: _likely(chance, key) for key in chosen},
            }
    return _written(chance, config)


def _section(chance: random.Random, cls: type[Section], more: Any = ()) -> dict[str, Any]:
    names = [each.name for each in modelled(cls)]
    names += sorted(more) if chance.random() < 0.3 else []
    chosen = chance.sample(names, min(len(names), chance.choice((0, 1, 2, 4, 8))))
    if "zero_optimization" in names and chance.random() < 0.8:
        chosen.append("zero_optimization")
    return {key: _likely(chance, key) for key in chosen}


def _likely(chance: random.Random, key: str) -> Any:
    if chance.random() < 0.1:
        return _value(chance)
    if key in SECTIONS:
        return _section(chance, SECTIONS[key], ZERO if key == "zero_optimization" else ())
    if key == "stage":
        return chance.choice((0, 1, 2, 3, 3, "auto"))
    if key == "device":
        return chance.choice(("none", "cpu", "nvme", "nvme"))
    if key == "lr":
        return chance.choice((1e-4, "1e-4", "auto", 1))
    return chance.choice((1, 2, 4, 8, 0, 0.5, 1e6, 5e8, True, False, True, False, "auto", "x"))


def _written(chance: random.Random, config: Any) -> Case:
    """Return a configuration as a file of some format, possibly inside a launcher's file."""
    around: Any = config
    if chance.random() < 0.4:
        key = chance.choice(("deepspeed_config", "--deepspeed_config", "deepspeed"))
        named = chance.choice((config, config, json.dumps(config), "", "case.json", "no.json"))
        around = {key: named}
        for name in chance.sample(sorted(LAUNCH_SETTINGS), 3):
            around[name] = _value(chance)
        if chance.random() < 0.5:
            around["distributed_type"] = chance.choice(("DEEPSPEED", "NO", False, None))
    text = json.dumps(around, indent=chance.choice((None, 1)))
    return Case(text=text, suffix=chance.choice((".json", ".json", ".yaml", ".hjson")))


def _grafted(chance: random.Random) -> Case:
    """Return a file with values replaced, keys added and levels moved."""
    text, suffix = chance.choice([file for file in FILES if file[1] == ".json"])
    try:
        config = json.loads(text)
    except ValueError:
        return _damaged(chance)
    for _ in range(chance.choice((1, 1, 2, 5))):
        node: Any = config
        while isinstance(node, dict) and node:
            key = chance.choice(sorted(node))
            if chance.random() < 0.4 or not isinstance(node[key], dict | list):
                action = chance.randrange(4)
                if action == 0:
                    node[_key(chance)] = node.pop(key)
                elif action == 1:
                    node[_key(chance)] = _value(chance)
                elif action == 2:
                    node[key] = {_key(chance): node[key]}
                else:
                    node[key] = _value(chance)
                break
            node = node[key]
    return Case(text=json.dumps(config), suffix=chance.choice((suffix, ".yaml", ".hjson")))


def _large(chance: random.Random) -> Case:
    """Return long repetitive input, to find operations that are slower than linear."""
    size = chance.choice((1_000, 30_000, 127_000, 1_000_000, 16_000_000))
    unit = chance.choice(
        (
            "1,", "0.1,", '"a",', "[", "{", '{"a":', "// c\n", "/*", "#", " ", "\n", '"',
            "\\", "a", "a b ",
            "'", "- ", "a: ", "? ", "[1],", "{},", "\\u0041", "é", "😀", "&a a\n", "*a,",
            "!!int ", "-",
            "1e5,", "9", "null,", "1.5e-300,", '"k":1,', "a: 1\n", "- 1\n", "|\n a\n", "\t",
            "%", "{{",
            chance.choice(TOKENS), "".join(chance.choice(TOKENS) for _ in range(4)),
        )
    )  # fmt: skip
    body = unit * (size // max(1, len(unit)))
    head, tail = chance.choice(
        (
            ("", ""), ("[", "1]"), ('{"_a": [', "1]}"), ('{"_a": "', '"}'), ("{", "}"), ("a: ", ""),
            ('{"train_batch_size": ', "}"), ('{"tensorboard": [', "1]}"), ("a: [", "]"),
            ('{"optimizer": {"type": "AdamW", "params": {"betas": [', "1]}}}"),
            ('{"deepspeed_config": "', '"}'), ("deepspeed_config:\n", ""), ("a: |\n ", ""),
        )
    )  # fmt: skip
    suffix = chance.choice((".json", ".json", ".json", ".yaml", ".hjson"))
    return Case(text=head + body + tail, suffix=suffix)


def _aliases(chance: random.Random) -> Case:
    """Return YAML with nested aliases."""
    levels, width = chance.randrange(1, 60), chance.randrange(1, 12)
    lines = ["a0: &a0 " + chance.choice(("x", "[x, x]", "{zero_stage: 2}", "1"))]
    for level in range(1, levels):
        before = f"*a{level - 1}"
        if chance.random() < 0.2:
            lines.append(f"a{level}: &a{level}\n  <<: [{', '.join([before] * width)}]")
        else:
            lines.append(f"a{level}: &a{level} [{', '.join([before] * width)}]")
    key = chance.choice(("deepspeed_config", "commands", "mixed_precision", "zero_optimization"))
    return Case(text="\n".join([*lines, f"{key}: *a{levels - 1}"]) + "\n", suffix=".yaml")


WAYS: Final[dict[Callable[[random.Random], Case], float]] = {
    _damaged: 30, _spliced: 6, _renamed: 1, _made_up: 30, _grafted: 30, _large: 1, _aliases: 2,
}  # fmt: skip


def make_case(seed: int, number: int) -> Case:
    """Return the case with this number; it is always the same."""
    chance = random.Random(f"{seed}.{number}")
    (way,) = chance.choices(list(WAYS), weights=list(WAYS.values()))
    return attrs.evolve(way(chance), seed=f"{seed}.{number}")
