"""accelerate itself launches the YAML of every built-in template."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.builder.states import CHOSEN
from zerotune.builder.templates import BUILTIN

SOME = ("nvme", "two-gpus")
"""Templates launched outside nightly runs, since each takes the launcher a second."""

# One process starts all files as `accelerate launch --config_file FILE script.py` does, so that the
# launcher's imports (3 s) are paid once.
LAUNCH = """
import os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = ""
from accelerate.commands import launch
script, *files = sys.argv[1:]
for file in files:
    arguments = launch.launch_command_parser().parse_args(["--config_file", file, script, file])
    launch.launch_command(arguments)
"""
SCRIPT = """
import json, os, sys
found = {k: v for k, v in os.environ.items() if k.startswith("ACCELERATE_")}
found |= {k: os.environ.get(k) for k in ("RANK", "WORLD_SIZE")}
with open(f"{sys.argv[1]}.{os.environ.get('RANK', '0')}", "w") as file:
    json.dump(found, file)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "templates",
    [SOME, pytest.param([one.id for one in BUILTIN], marks=pytest.mark.nightly)],
    ids=["some", "all"],
)
def test_accelerate_launches_the_yaml_of_every_template(templates, client, root, tmp_path):
    pytest.importorskip("accelerate")
    states = {}
    for name in templates:
        body = {"id": name, "setup": CHOSEN}
        states[name] = client.post("/api/templates/use", json=body).json()["state"]
        saved = client.post("/api/save", json={"path": f"{name}.yaml", "state": states[name]})
        assert saved.is_success, saved.text
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            LAUNCH,
            str(script),
            *(str(root / f"{name}.yaml") for name in templates),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for name in templates:
        processes = states[name]["setup"]["world_size"]
        for rank in range(processes):
            seen = json.loads((root / f"{name}.yaml.{rank}").read_text())
            assert seen["WORLD_SIZE"] == str(processes), name
            assert seen["ACCELERATE_USE_DEEPSPEED"] == "true", name
            given = json.loads(seen["ACCELERATE_DEEPSPEED_CONFIG_FILE"])
            assert given == states[name]["config"], name
