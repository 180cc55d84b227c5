"""Small files that are costly to read, or that make Python itself fail."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from zerotune import DeepSpeedPlan
from zerotune.errors import (
    InvalidValueError,
    PlanError,
    PlanFileError,
    PlanSyntaxError,
    UnknownKeyError,
    shorten,
)
from zerotune.plan.source import parse_json, parse_yaml

LONG = "9" * 310
YAML = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n"


def bomb(levels: int) -> str:
    lines = ["commands:", "- &a0 [x, x, x, x, x, x, x, x, x]"]
    for level in range(1, levels):
        lines.append(f"- &a{level} [" + ", ".join([f"*a{level - 1}"] * 9) + "]")
    return "\n".join(lines) + f"\nzero_stage: *a{levels - 1}\n"


class TestYaml:
    def test_nested_aliases_are_refused_before_they_are_expanded(self):
        with pytest.raises(PlanSyntaxError, match="expand to too many") as caught:
            parse_yaml(bomb(60), source="x.yaml")
        assert caught.value.line > 1

    def test_a_few_aliases_are_read(self):
        read = parse_yaml("a: &a {b: [1, 2]}\nc: *a\nd:\n  <<: *a\n", source="x")
        assert read == {"a": {"b": [1, 2]}, "c": {"b": [1, 2]}, "d": {"b": [1, 2]}}

    def test_an_anchor_that_contains_itself_is_refused(self):
        with pytest.raises(PlanSyntaxError, match="refers to itself"):
            parse_yaml("a: &a [*a]", source="x")

    @pytest.mark.parametrize("digits", ["0x" + "f" * 6000, "9" * 6000, "1:" * 3000 + "1"])
    def test_long_numbers_in_yaml_are_refused(self, digits):
        with pytest.raises(PlanSyntaxError, match="too long"):
            parse_yaml(f"a: {digits}", source="x")

    @pytest.mark.parametrize("text", ["[" * 3000, "a: " * 3000, "- " * 3000])
    def test_deeply_nested_text_is_refused(self, text):
        with pytest.raises(PlanSyntaxError):
            parse_yaml(text, source="x")

    @pytest.mark.parametrize(
        "text",
        [
            "!!int x",
            "!!bool 2",
            "!!float [1]",
            "!!timestamp x",
            "!!map 1",
            "? [a]: b",
            "!!binary é",
        ],
    )
    def test_text_that_crashes_pyyaml_is_a_syntax_error(self, text):
        with pytest.raises(PlanSyntaxError):
            parse_yaml(f"a: {text}\n? {text}\n: 1\n", source="x")

    @pytest.mark.parametrize("written", ["-.inf", ".nan", "2020-01-01", "[1]", "{a: 1}", "3"])
    def test_a_distributed_type_that_is_not_text_is_refused(self, tmp_path, written):
        file = tmp_path / "a.yaml"
        file.write_text(YAML.replace("DEEPSPEED", written))
        with pytest.raises(InvalidValueError, match="must be text"):
            DeepSpeedPlan.load(file)


class TestJson:
    @pytest.mark.parametrize(
        "config",
        [
            f'{{"train_batch_size": {LONG}}}',
            f'{{"optimizer": {{"type": "AdamW", "params": {{"lr": {LONG}}}}}}}',
            f'{{"gradient_clipping": {LONG}}}',
            f'{{"_remark": [{LONG}]}}',
            f'{{"fp16": {{"loss_scale": "{"1" * 5000}"}}}}',
        ],
    )
    def test_numbers_that_overflow_a_float_are_refused(self, config):
        with pytest.raises(PlanError):
            DeepSpeedPlan.from_json(config)

    def test_an_unpaired_surrogate_is_refused(self):
        with pytest.raises(PlanSyntaxError, match="surrogate"):
            parse_json('{"a": 1,\n "\\ud800": 1}', source="x")
        with pytest.raises(PlanSyntaxError, match="surrogate"):
            parse_json('{"\ud800": 1}', source="x")
        assert parse_json('["\\ud83d\\ude00", "\\\\ud800"]', source="x")[0] == ["😀", "\\ud800"]

    def test_text_nested_to_the_limit_is_read(self):
        assert parse_json("[" * 100 + "]" * 100, source="x")
        for text in ("[" * 101 + "]" * 101, '{"a":' * 101 + "1" + "}" * 101):
            with pytest.raises(PlanSyntaxError, match="too deeply"):
                parse_json(text, source="x")


class TestSize:
    def test_an_endless_file_is_refused(self):
        if not Path("/dev/zero").exists():
            pytest.skip("no /dev/zero")
        with pytest.raises(PlanFileError, match=r"larger than 16\.00 MiB"):
            DeepSpeedPlan.from_json("/dev/zero")

    def test_a_pipe_that_nothing_writes_to_is_refused(self, tmp_path):
        os.mkfifo(tmp_path / "ds.json")
        with pytest.raises(PlanFileError, match="is a pipe"):
            DeepSpeedPlan.from_json(tmp_path / "ds.json")

    def test_a_file_with_too_many_values_is_refused(self, tmp_path):
        file = tmp_path / "ds.json"
        file.write_text('{"_note": ["a,b", ' + "1.5," * 900_000 + "2]}")
        with pytest.raises(PlanFileError, match="838,860 values"):
            DeepSpeedPlan.load(file)

    def test_commas_in_strings_do_not_count_as_values(self):
        text = '{"_note": "' + r"\",\\," * 500_000 + '"}'
        assert len(DeepSpeedPlan.from_json(text).extra["_note"]) == 2_000_000

    def test_a_plan_too_long_to_be_read_as_yaml_is_not_written(self):
        plan = DeepSpeedPlan.from_dict({"_note": "x" * 200_000})
        with pytest.raises(InvalidValueError, match=r"longer than 128\.00 KiB"):
            plan.to_yaml()

    def test_yaml_has_a_lower_size_limit(self):
        with pytest.raises(PlanFileError, match="limit for a configuration"):
            parse_yaml("#" * 300_000, source="x")
        assert parse_yaml("#" * 100_000, source="x") is None


class TestValues:
    def test_a_value_that_expands_exponentially_is_refused(self):
        value: object = [1]
        for _ in range(12):
            value = [value] * 9
        with pytest.raises(InvalidValueError, match="too many values"):
            DeepSpeedPlan.from_dict({"_remark": value})
        with pytest.raises(InvalidValueError) as caught:
            DeepSpeedPlan.from_dict({"train_batch_size": value})
        assert len(str(caught.value)) < 400

    def test_a_number_too_long_for_python_to_print_is_shown_in_hex(self):
        assert shorten(-(2**40_000)) == "-0x8000000000000000…"

    def test_a_list_that_contains_itself_is_shown(self):
        value: list[object] = []
        value.append(value)
        assert len(shorten(value)) <= 120

    def test_keys_are_shown_truncated_and_without_control_characters(self):
        with pytest.raises(UnknownKeyError) as caught:
            DeepSpeedPlan.from_dict({"k" * 100_000: 1})
        assert len(str(caught.value)) < 600
        with pytest.raises(UnknownKeyError, match=r"a\\x1b\[2Jb"):
            DeepSpeedPlan.from_dict({"a\x1b[2Jb": 1})

    @pytest.mark.parametrize(
        "config",
        [
            {"scheduler": "\ud800"},
            {"optimizer": {"type": "a\ud800"}},
            {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/\udc80"}}},
            {"deepspeed_config": {}, "offload_param_path": "/\ud800"},
        ],
    )
    def test_unpaired_surrogates_are_refused_in_every_text(self, config):
        with pytest.raises(InvalidValueError, match="surrogate"):
            DeepSpeedPlan.from_dict(config)

    def test_plans_derived_from_one_another_share_no_mutable_state(self):
        plan = DeepSpeedPlan.from_dict({"tensorboard": {"enabled": True}, "_note": [1]})
        other = plan.with_overrides({"gradient_clipping": 1.0})
        evolved = attrs.evolve(plan, gradient_clipping=1.0)
        plan.extra["_note"].append(2)
        plan.extra["tensorboard"]["enabled"] = False
        with pytest.raises(TypeError):
            plan.extra["_note"] = 3
        for each in (plan, other, evolved):
            assert each.extra == {"tensorboard": {"enabled": True}, "_note": [1]}
        again = pickle.loads(pickle.dumps(plan))
        assert again == plan == copy.deepcopy(plan)
        assert repr(plan.extra) == repr({"tensorboard": {"enabled": True}, "_note": [1]})

    def test_a_section_copies_its_arguments(self):
        config = {
            "_remark": {"a": [1]},
            "optimizer": {"type": "AdamW", "params": {"betas": [0, 0]}},
        }
        before = copy.deepcopy(config)
        plan = DeepSpeedPlan.from_dict(config)
        config["_remark"]["a"].append(2)
        plan.to_dict()["_remark"]["a"].append(3)
        assert plan.to_dict() == before


def test_output_to_an_ascii_terminal_is_escaped(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"träin": 1}), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "zerotune", "plan", "check", str(file)],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "tr\\xe4in" in done.stdout
    assert "Traceback" not in done.stderr
