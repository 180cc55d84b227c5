from __future__ import annotations

import copy
import json
import re
import subprocess
import sys

import pytest

from zerotune import DeepSpeedPlan, cli
from zerotune.platform import Platform

HEAVY = ("torch", "deepspeed", "accelerate", "numpy", "diffusers")
CLEAN = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
}


ADAFACTOR = {"type": "Adafactor", "params": {"lr": 1e-3}}


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """Return a function that checks a configuration and returns exit status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(content, *options):
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "ds.json").write_text(text)
        status = cli.main(["plan", "check", "ds.json", *options])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def test_a_clean_file_has_nothing_to_report(check):
    assert check(CLEAN) == (0, "ds.json: nothing to report at 1 process\n", "")


def test_notes_do_not_fail_the_check(check):
    status, out, _ = check({"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0})
    assert status == 0
    assert "[note] micro-batch-unset: " in out


def test_warnings_fail_only_when_strict(check):
    config = {**CLEAN, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}
    assert check(config)[0] == 0
    status, out, _ = check(config, "--strict")
    assert status == 1
    assert out.splitlines()[0] == "ds.json: 1 warning at 1 process"
    assert "[warning] line 1, offload-param-below-stage-3: " in out


def test_warnings_from_reading_the_file_count(check):
    status, out, _ = check(json.dumps(CLEAN) + " // mine", "--strict")
    assert status == 1
    assert "contains comments" in out


@pytest.mark.parametrize(
    ("change", "rule", "key"),
    [
        ({"zero_optimization": {"stage": 9}}, "read", "zero_optimization.stage"),
        ({"zero_optimisation": {}}, "read", "zero_optimisation"),
        ({"train_batch_size": 3}, "batch-triple", "train_batch_size"),
        ({"communication_data_type": "auto"}, "resolve", "communication_data_type"),
        ({"optimizer": {"type": "AdmaW"}}, "optimizer", "optimizer.type"),
    ],
)
def test_errors_at_any_stage_of_the_check_fail(check, change, rule, key):
    status, out, err = check({**CLEAN, "gradient_accumulation_steps": 2, **change}, "--json")
    assert (status, err) == (1, "")
    report = json.loads(out)
    assert report["errors"] == 1
    (error,) = [each for each in report["findings"] if each["severity"] == "error"]
    assert (error["rule"], error["key"]) == (rule, key)
    assert "Fix: " in error["text"]


def test_an_optimizer_that_needs_a_model_is_not_an_error_in_a_file(check):
    config = {**CLEAN, "optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}
    status, out, _ = check(config)
    assert status == 0
    assert "[error]" not in out
    config["optimizer"]["params"]["momentum"] = 2
    status, out, _ = check(config)
    assert status == 1
    assert "optimizer.params.momentum = 2" in out


def test_an_update_on_the_device_that_cannot_run_is_reported(check):
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    plan = CLEAN | {"zero_optimization": offload, "optimizer": ADAFACTOR}
    assert "Adafactor" in check(plan)[1]
    assert check(plan, "--update", "device") == (0, "ds.json: nothing to report at 1 process\n", "")
    fp32 = {key: value for key, value in plan.items() if key != "bf16"}
    assert "trains in fp32" in check(fp32, "--update", "device")[1]


def test_the_check_depends_on_the_world_size(check):
    config = {**CLEAN, "train_batch_size": 4, "gradient_accumulation_steps": 4}
    assert check(config)[0] == 0
    assert check(config, "--world-size", "2")[0] == 1


def test_values_that_a_run_fills_in_are_not_errors(check):
    config = {
        **CLEAN,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"},
        },
    }
    status, out, _ = check(config)
    assert status == 0
    assert "[error]" not in out


def test_automatic_warmup_is_not_reported_as_no_warmup(check):
    names = ("warmup_num_steps", "warmup_min_lr", "warmup_max_lr")
    scheduler = {"type": "WarmupLR", "params": dict.fromkeys(names, "auto")}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4}}
    config = {**CLEAN, "optimizer": optimizer, "scheduler": scheduler}
    assert check(config, "--strict") == (0, "ds.json: nothing to report at 1 process\n", "")


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"optimizer": {"type": "adamw_torch", "params": {"lr": 1e-4}}}, "optimizer-spelling"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}, "scheduler-no"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1e3}}},
            "scheduler-warm",
        ),
    ],
)
def test_what_only_deepspeed_refuses_fails_the_check_but_not_a_run(check, change, rule):
    status, out, _ = check({**CLEAN, **change})
    assert status == 1
    assert f"{rule}" in next(line for line in out.splitlines() if line.startswith("[error]"))
    plan = DeepSpeedPlan.from_dict({**CLEAN, **change})
    assert [finding.severity for finding in plan.check()] == ["warning"]
    plan.resolve(platform=Platform.synthetic("cuda"))


REJECTED = [
    *({"zero_optimization": {"stage": 2, "offload_optimizer": each}}
      for each in ({"device": "gpu"}, {"device": "CPU"}, {"device": None}, "cpu", False)),
    {"zero_optimization": {"stage": 2, "reduce_bucket_size": "5e8"}},
    {"bf16": True},
    {"amp": {"enabled": False}},
    *({key: "1"} for key in ("train_batch_size", "gradient_accumulation_steps")),
    {"train_micro_batch_size_per_gpu": "1"},
    *({"wall_clock_breakdown": each} for each in ("false", None)),
]  # fmt: skip


@pytest.mark.parametrize("change", REJECTED, ids=str)
def test_spellings_that_only_zerotune_reads_fail_the_check_but_not_a_run(check, change):
    status, out, _ = check({**CLEAN, **change})
    assert status == 1
    assert len([line for line in out.splitlines() if line.startswith("[error]")]) == 1
    DeepSpeedPlan.from_dict({**CLEAN, **change}).resolve(platform=Platform.synthetic("cuda"))


@pytest.mark.deepspeed
@pytest.mark.parametrize("change", REJECTED, ids=str)
def test_deepspeed_rejects_the_spellings_that_fail_the_check(change, monkeypatch):
    import deepspeed.runtime.config as reading

    from tests.plan.test_deepspeed_agrees import Ranks

    monkeypatch.setattr(reading, "dist", Ranks(1))
    with pytest.raises((ValueError, TypeError, reading.DeepSpeedConfigError)):
        reading.DeepSpeedConfig(copy.deepcopy({**CLEAN, **change}))


@pytest.mark.parametrize("content", ["{", '{"a": 1,, }', "\x00"])
def test_an_unreadable_file_gives_status_2(check, content):
    status, out, err = check(content)
    assert (status, out) == (2, "")
    assert err.startswith("error: ds.json: ")


def test_all_errors_are_reported(check):
    config = {**CLEAN, "train_batch_siz": 8, "gradient_clipping": "x", "train_batch_size": 3,
              "zero_optimization": {"stage": 2, "foo": 1}, "optimizer": {"type": "AdmaW"},
              "gradient_accumulation_steps": 2}  # fmt: skip
    status, out, err = check(config)
    assert (status, err) == (1, "")
    told = [line for line in out.splitlines() if line.startswith("[error]")]
    rules = [line.split()[3] for line in told]
    assert rules == ["read:", "read:", "read:", "batch-triple:", "optimizer:"]


@pytest.mark.parametrize(("content", "line"), [("{", 1), ('{"a": 1,\n,}', 2)])
def test_the_report_on_an_unreadable_file_is_json_too(check, content, line):
    status, out, err = check(content, "--json")
    assert (status, err) == (2, "")
    (finding,) = json.loads(out)["findings"]
    assert (finding["severity"], finding["rule"], finding["line"]) == ("error", "file", line)
    assert finding["key"] == "ds.json"


def test_the_report_on_a_missing_file_is_json_too(tmp_path, capsys):
    assert cli.main(["plan", "check", str(tmp_path / "no.json"), "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "no such file" in json.loads(printed.out)["findings"][0]["text"]


def test_the_check_imports_no_heavy_package(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(CLEAN))
    command = ["-m", "zerotune", "plan", "check", str(tmp_path / "ds.json")]
    first = subprocess.run(
        [sys.executable, "-X", "importtime", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert first.returncode == 0, first.stderr
    loaded = {line.rpartition("|")[2].strip() for line in first.stderr.splitlines()}
    assert "zerotune.plan.read" in loaded
    assert not loaded.intersection(HEAVY)


def test_each_finding_names_the_line_of_its_key(check):
    content = """{
      // of the page
      "bf16": {"enabled": true}, "fp16": {"enabled": true},
      "_lists": [{"train_batch_size": 1}],
      "zero_optimization": {
        "stage": 2,

        "foo": 1
      },
      "train_batch_size": 3, "gradient_accumulation_steps": 2
    }"""
    status, out, _ = check(content)
    assert status == 1
    assert "[error] line 8, read: zero_optimization.foo = 1: " in out
    assert "[error] line 3, precision-conflict: " in out
    assert "[error] line 10, batch-triple: " in out
    lines = {one["key"]: one["line"] for one in json.loads(check(content, "--json")[1])["findings"]}
    assert lines["zero_optimization.foo"] == 8


def test_a_finding_in_an_accelerate_yaml_names_the_line_of_the_yamls_own_key(tmp_path, capsys):
    path = tmp_path / "accelerate.yaml"
    path.write_text(
        "distributed_type: DEEPSPEED\n"
        "deepspeed_config:\n"
        "  zero_stage: 2\n"
        "  offload_param_device: cpu\n"
        "mixed_precision: bf16\n"
    )
    assert cli.main(["plan", "check", str(path), "--strict"]) == 1
    assert "[warning] line 4, offload-param-below-stage-3: " in capsys.readouterr().out


def test_a_key_of_a_newer_deepspeed_passes_if_it_is_named(check):
    config = {**CLEAN, "zero_optimization": {"stage": 2, "brand_new": 1}, "newer": 2}
    status, out, _ = check(config)
    assert status == 1
    assert "--also-known KEY" in out
    known = ("--also-known", "zero_optimization.brand_new", "--also-known", "newer")
    assert check(config, *known) == (0, "ds.json: nothing to report at 1 process\n", "")


def test_arguments_of_an_optimizer_are_no_keys_of_a_newer_deepspeed(check):
    status, out, _ = check({**CLEAN, "optimizer": {"type": "AdamW", "params": {"lr": 1, "a": 1}}})
    assert (status, "optimizer.params.a = 1: " in out) == (1, True)
    assert "--also-known" not in out


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--world-size", "1" * 23), "is more than 1,000,000 processes"),
        (("\0",), "error: an argument contains a NUL character"),
    ],
)
def test_meaningless_options_are_an_error(check, wrong, said):
    try:
        status, _, err = check(CLEAN, *wrong)
        assert said in err
    except SystemExit as ended:
        status = ended.code
    assert status == 2


def test_the_number_of_processes_defaults_to_that_in_the_launchers_file(tmp_path, capsys):
    path = tmp_path / "a.yaml"
    path.write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 2\nmixed_precision: bf16\n"
        "deepspeed_config:\n  zero_stage: 2\n  gradient_clipping: 1.0\n"
    )
    assert cli.main(["plan", "check", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "at 2 processes" in printed
    assert "world-size" not in printed
    assert cli.main(["plan", "check", str(path), "--world-size", "4"]) == 0
    assert "num_processes = 2: the launcher's file requests 2" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "kind"), [("null", "null"), ("[1]", "a list"), ("3", "a number")])
def test_a_file_that_is_not_an_object_is_refused_in_json_terms(check, text, kind):
    status, out, _ = check(text)
    assert status == 1
    assert f"[error] read: ds.json must contain an object, not {kind}. " in out


def test_trailing_commas_give_a_warning_with_a_fix(check):
    status, out, _ = check(json.dumps(CLEAN)[:-1] + ",}")
    assert status == 0
    assert re.search(
        r"\[warning\] read: ds.json: contains trailing commas, which strict "
        r"JSON and accelerate reject. Fix: remove them.\n",
        out,
    )


def test_a_file_that_is_too_large_is_refused(check):
    status, _, err = check("#" * (16 * 2**20 + 1))
    assert status == 2
    assert "is larger than 16.00 MiB" in err


BROKEN = """{
  "train_micro_batch_size_per_gpu": 2,
  "zero_optimization": {
    "stage": 2,
    "reduce_bucket_size": -5
  },
  "gradient_clip": 1
}"""


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.yaml", "learning_rate: 1e-4\ndeepspeed: ds.json\n"),
        ("run.json", '{"seed": 1,\n "zero_optimization": 1, "deepspeed_config": "ds.json"}'),
        (
            "launch.yaml",
            "{distributed_type: DEEPSPEED, num_processes: 1, deepspeed_config: {FILE: ds.json}}",
        ),
    ],
)
def test_errors_in_a_named_file_carry_its_name_and_line(tmp_path, capsys, name, content):
    (tmp_path / "ds.json").write_text(BROKEN)
    (tmp_path / name).write_text(content.replace("FILE", "deepspeed_config_file"))
    assert cli.main(["plan", "check", str(tmp_path / name)]) == 1
    out = capsys.readouterr().out
    assert f"{tmp_path / 'ds.json'} line 5, read: zero_optimization.reduce_bucket_size" in out
    assert f"{tmp_path / 'ds.json'} line 7, read: gradient_clip" in out
    cli.main(["plan", "check", str(tmp_path / name), "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    errors = [each for each in findings if each["severity"] == "error"]
    assert {(each["file"], each["line"]) for each in errors} == {
        (str(tmp_path / "ds.json"), 5),
        (str(tmp_path / "ds.json"), 7),
    }


def test_errors_in_a_part_of_a_trainers_file_carry_their_line(tmp_path, capsys):
    (tmp_path / "run.json").write_text(f'{{"learning_rate": 1e-4,\n"deepspeed":\n{BROKEN}}}')
    assert cli.main(["plan", "check", str(tmp_path / "run.json")]) == 1
    out = capsys.readouterr().out
    assert "[error] line 7, read: zero_optimization.reduce_bucket_size" in out
    assert "[error] line 9, read: gradient_clip" in out
