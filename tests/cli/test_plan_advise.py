from __future__ import annotations

import json

import pytest

from zerotune import cli
from zerotune.plan import DeepSpeedPlan
from zerotune.plan.text.memory import WIDTH
from zerotune.platform.facts import GIB

ROOMY = ("--vram", "24GiB", "--ram", "128GiB")
TINY = ("--vram", "1GiB", "--ram", "2GiB")


def advise(*arguments):
    return cli.main(["plan", "advise", "--family", "sdxl", *arguments])


class TestWhenSomethingFits:
    def test_text_shows_the_chosen_plan(self, capsys):
        assert advise(*ROOMY, "--no-streamed") == 0

        printed = capsys.readouterr()
        assert printed.err == ""
        assert printed.out.startswith(
            "Advice for 24.00 GiB of device memory, 128.00 GiB of host memory, no NVMe, 5% of"
        )
        assert "\nChosen: ZeRO-" in printed.out
        assert "\n  chosen  " in printed.out

    def test_five_candidates_are_shown_unless_all_are_requested(self, capsys):
        def shown():
            lines = capsys.readouterr().out.splitlines()
            states = ("  chosen ", "  fits ", "  too big ", "  refused ")
            return sum(line.startswith(states) for line in lines), lines[-1]

        assert advise(*ROOMY) == 0
        few, last = shown()
        assert few == 5
        assert last.startswith("  --all shows ")
        assert advise(*ROOMY, "--all") == 0
        every, _ = shown()
        assert every - few == int(last.split()[2])

    def test_advised_activation_offload_is_said_since_the_file_cannot(self, tmp_path, capsys):
        path = tmp_path / "plan.json"
        machine = ("--family", "sdxl", "--vram", "6.9", "--ram", "64")
        assert cli.main(["plan", "advise", *machine, "-o", str(path)]) == 0
        printed = capsys.readouterr()
        assert "activation offload" in printed.out
        assert "cannot express activation offload" in printed.err
        explain = ["plan", "explain", str(path), *machine]
        assert cli.main(explain) == 0
        assert "inputs on the host" not in capsys.readouterr().out
        assert cli.main([*explain, "--activation-offload"]) == 0
        assert "inputs on the host" in capsys.readouterr().out

    def test_a_card_gives_its_memory_and_rates(self, capsys):
        assert advise("--card", "3090", "--ram", "128", "--json") == 0
        slow = json.loads(capsys.readouterr().out)
        assert slow["budget"]["device"] == 24 * GIB
        assert advise("--card", "RTX 4090", "--ram", "128", "--no-streamed") == 0
        assert "catalogued for RTX 4090" in capsys.readouterr().out
        assert advise("--card", "a100", "--vram", "40", "--ram", "128", "--json") == 0
        assert json.loads(capsys.readouterr().out)["budget"]["device"] == 40 * GIB

    def test_options_reach_the_advice(self, capsys):
        options = ("--batch", "2", "--resolution", "512", "--ema", "host", "--precision", "bf16")
        assert advise(*ROOMY, *options, "--json") == 0

        data = json.loads(capsys.readouterr().out)
        workload = data["estimate"]["workload"]
        assert (workload["batch"], workload["width"], workload["ema"]) == (2, 512, "host")
        assert data["estimate"]["plan"]["precision"] == "bf16"

    def test_the_plan_is_saved(self, tmp_path, capsys):
        path = tmp_path / "plan.json"
        assert advise(*ROOMY, "--no-streamed", "--json", "-o", str(path)) == 0

        printed = capsys.readouterr()
        assert DeepSpeedPlan.load(path) == DeepSpeedPlan.from_dict(json.loads(printed.out)["plan"])
        assert printed.err == f"zerotune: the plan is saved in {path}\n"

    def test_a_streaming_plan_says_what_it_needs_besides_its_file(self, tmp_path, capsys):
        path = tmp_path / "plan.json"
        flux = ("--family", "flux", "--vram", "24GiB", "--ram", "192GiB", "--precision", "bf16")
        assert cli.main(["plan", "advise", *flux, "--streamed", "-o", str(path), "--json"]) == 0

        printed = capsys.readouterr()
        memory = json.loads(printed.out)["streamed"]["memory"]
        assert memory > 12 * GIB
        assert f'write streamed: {{"memory": {memory}' in printed.err
        assert "plan.resolve(" not in printed.err

    def test_an_update_on_the_device_is_asked_for_by_name(self, tmp_path, capsys):
        path = tmp_path / "plan.json"
        asked = ("--update", "device:split", "--optimizer", "Adafactor", "--json", "-o", str(path))
        assert advise(*ROOMY, *asked) == 0
        printed = capsys.readouterr()
        assert json.loads(printed.out)["update"] == "device:split"
        assert "write update: device:split for zerotune train" in printed.err


class TestWhenNothingFits:
    def test_the_nearest_plan_is_shown_with_status_1(self, capsys):
        assert advise(*TINY) == 1

        printed = capsys.readouterr()
        assert printed.err == ""
        assert "\nNearest: " in printed.out
        assert "\n  missing: device " in printed.out
        assert ", over by " in printed.out

    def test_json_holds_the_nearest_plan_when_nothing_fits(self, capsys):
        assert advise(*TINY, "--json") == 1

        data = json.loads(capsys.readouterr().out)
        assert data["fits"] is False
        assert data["nearest"]["fits"] is False
        assert data["nearest"]["shortfalls"]


class TestMistakes:
    @pytest.mark.parametrize("wrong", ["12G", "much"])
    def test_an_invalid_size_gives_one_line_and_status_2(self, wrong, capsys):
        assert advise("--vram", wrong, "--ram", "64GiB") == 2

        error = capsys.readouterr().err
        assert error.startswith(f"error: --vram = '{wrong}': ")
        assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("named", "why"), [("50", "names several listed cards"), ("GTX 970", "is not a listed card")]
)
def test_an_unknown_card_is_refused_with_the_names_of_cards(named, why, capsys):
    assert advise("--card", named, "--ram", "64") == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: --card = '{named}': {why}. Fix: write one of ")
    assert "RTX 5090" in said


def test_memory_that_is_not_given_is_read_from_this_machine(capsys):
    assert advise("--vram", "24GiB", "--json") in {0, 1}

    assert "zerotune: --ram not given: planning with this machine's " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            ("--family", "qwen"),
            (
                "error: --family = 'qwen': is not a known model family. Fix: did you mean "
                "'qwen-image' or 'qwen-image-controlnet' or 'qwen-image-edit'?\n"
            ),
        ),
        (
            ("--family", "sdxl", "--base-dtype", "nf4", "--vram", "24", "--ram", "64"),
            (
                "error: --base-dtype = 'nf4': a quantized model cannot be trained; only adapters "
                "on it can. Fix: add adapters, such as --lora 16, or omit --base-dtype.\n"
            ),
        ),
        (
            ("--family", "sdxl", "--model", "folder"),
            (
                "error: --model = 'folder': has no effect without --family module:Class. Fix: "
                "remove this option, or pass the family's class.\n"
            ),
        ),
    ],
)
def test_a_mistake_prints_only_a_message_that_names_command_line_options(wrong, message, capsys):
    assert cli.main(["plan", "advise", *wrong]) == 2
    assert capsys.readouterr().err == message


def test_the_message_that_nothing_fits_wraps_at_the_page_width(capsys):
    assert cli.main(["plan", "advise", "--family", "flux", "--vram", "8", "--ram", "32"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("error: memory = ")
    assert max(map(len, printed.splitlines())) <= WIDTH
    assert "--lora 16" in printed
