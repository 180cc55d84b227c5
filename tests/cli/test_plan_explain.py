from __future__ import annotations

import json

import pytest

from zerotune import cli


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Return a function that writes a configuration into the working folder, which is temporary."""
    monkeypatch.chdir(tmp_path)

    def write(**changes):
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "bf16": {"enabled": "true"},
            **changes,
        }
        (tmp_path / "plan.json").write_text(json.dumps(config))
        return "plan.json"

    return write


def explain(*arguments):
    return cli.main(["plan", "explain", *arguments])


class TestWithoutAModel:
    def test_text_shows_settings_and_notes(self, file, capsys):
        assert explain(file()) == 0

        printed = capsys.readouterr()
        assert printed.err == ""
        assert printed.out.startswith("Plan from ")
        assert "optimizer state in host memory" in printed.out
        assert "[note] bf16.enabled: 'true' -> True" in printed.out
        assert printed.out.endswith("\n")
        assert not printed.out.endswith("\n\n")

    def test_json_holds_settings_and_decisions(self, file, capsys):
        assert explain(file(), "--json") == 0

        data = json.loads(capsys.readouterr().out)
        assert data["stage"] == 2
        assert data["decisions"][0]["key"] == "bf16.enabled"

    def test_the_headline_counts_the_errors_below_it(self, file, capsys):
        assert explain(file(fp16={"enabled": True})) == 1

        lines = capsys.readouterr().out.splitlines()
        assert lines[0].endswith(": cannot run, 1 error")
        assert lines[1].startswith("  [error] precision-conflict: ")

    def test_an_error_of_the_rules_gives_status_1(self, file, capsys):
        wrong = file(zero_optimization={"stage": 1, "offload_optimizer": {"device": "nvme"}})

        assert explain(wrong) == 1
        assert "[error]" in capsys.readouterr().out

    def test_the_world_size_reaches_the_rules(self, file):
        triple = file(train_batch_size=4, gradient_accumulation_steps=2)

        assert explain(triple, "--world-size", "2") == 0
        assert explain(triple, "--world-size", "3") == 1

    @pytest.mark.parametrize(
        "option",
        [["--batch", "2"], ["--resolution", "512"], ["--frames", "9"], ["--chart", "a.png"],
         ["--no-gradient-checkpointing"]],
    )  # fmt: skip
    def test_options_that_need_a_model_are_refused_without_one(self, file, option, capsys):
        assert explain(file(), *option) == 2

        error = capsys.readouterr().err
        assert f"{option[0]}: has no effect without --family NAME" in error


MACHINE = ("--accelerator", "cuda", "--vram", "24GiB", "--ram", "128GiB")


class TestForAModel:
    MODEL = ("--family", "sd3-medium", "--card", "4090")

    @pytest.mark.parametrize(
        ("options", "engine", "where", "gib"),
        [
            (("--engine", "deepspeed"), "DeepSpeed", "on the device", 8.3),
            (("--engine", "host"), "host engine", "on the device", 5.6),
            (("--streamed",), "host engine", "room for 3 units", 2.4),
            (("--keep", "3"), "host engine", "room for 3.00 GiB", 4.9),
        ],
        ids=str,
    )
    def test_the_engine_and_room_for_streamed_weights(
        self, file, capsys, options, engine, where, gib
    ):
        assert explain(file(), *self.MODEL, *options) == 0
        said = capsys.readouterr().out
        assert f"  engine          {engine}, 1 process" in said
        assert where in next(line for line in said.splitlines() if line.startswith("  parameters"))
        assert explain(file(), *self.MODEL, *options, "--json") == 0
        found = json.loads(capsys.readouterr().out)["estimate"]["places"]["device"]
        assert found["peak"] / 2**30 == pytest.approx(gib, abs=0.4)

    def test_the_update_on_the_device_and_its_optimizer(self, file, capsys):
        options = (*self.MODEL, "--streamed", "--update", "device:split", "--ram", "64")
        assert explain(file(optimizer={"type": "Adafactor"}), *options) == 0
        said = capsys.readouterr().out
        assert "  update          on the device, with split master weights" in said
        assert "Adafactor(" in said

    def test_text_shows_the_resolved_plan_and_its_memory(self, file, capsys):
        assert explain(file(), "--family", "sdxl", *MACHINE) == 0

        printed = capsys.readouterr()
        assert printed.err == ""
        assert printed.out.startswith("Resolved plan from ")
        assert (
            "\nMemory per rank: ZeRO-2, optimizer in host memory, bf16, 1 process\n" in printed.out
        )
        assert " of 24.00 GiB, " in printed.out
        assert " of 128.00 GiB, " in printed.out

    def test_too_little_memory_gives_status_1(self, file, capsys):
        little = ("--accelerator", "cuda", "--vram", "2GiB", "--ram", "128GiB")

        assert explain(file(), "--family", "sdxl", *little, "--json") == 1
        data = json.loads(capsys.readouterr().out)
        assert {one["place"]: one["fits"] for one in data["estimate"]["fits"]} == {
            "device": False, "host": True,
        }  # fmt: skip
        assert data["resolved"]["stage"] == 2
        assert data["estimate"]["places"]["device"]["peak"] > 2 * 1024**3

    def test_a_card_gives_its_memory_and_rates(self, file, capsys):
        options = ("--family", "sdxl", "--card", "3090", "--ram", "256")
        assert explain(file(), *options) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "of 24.00 GiB" in said
        assert "catalogued for RTX 3090" in said
        assert explain(file(), *options, "--accelerator", "rocm") == 2
        assert "--accelerator = 'rocm': contradicts --card 3090" in capsys.readouterr().err

    def test_more_samples_and_pixels_need_more_memory(self, file, capsys):
        def device(*options):
            open_plan = file(train_micro_batch_size_per_gpu="auto")
            explain(open_plan, "--family", "sdxl", *MACHINE, "--json", *options)
            phases = json.loads(capsys.readouterr().out)["estimate"]["places"]["device"]["phases"]
            return phases["forward and backward"]

        small = device("--resolution", "512")
        assert device("--resolution", "1024") > small
        assert device("--resolution", "512", "--batch", "4") > small
        assert device("--resolution", "512", "--no-gradient-checkpointing") > small

    def test_the_chart_is_drawn(self, file, tmp_path):
        assert explain(file(), "--family", "sdxl", *MACHINE, "--chart", "memory.png") == 0

        assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
