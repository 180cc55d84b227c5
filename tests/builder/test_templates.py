"""Built-in templates: each gives a plan that fits its machine."""

from __future__ import annotations

from tests.builder.states import CHOSEN
from zerotune.builder.templates import BUILTIN
from zerotune.plan.families import family_names


def test_built_in_templates_are_of_known_families():
    assert {one.setup.get("family") for one in BUILTIN} <= {None, *family_names()}
    assert len(BUILTIN) == 12


def test_every_built_in_template_fits_its_machine(client):
    zero = {}
    for one in BUILTIN:
        body = {"id": one.id, "setup": {**CHOSEN, "lora": "4", "resolution": "64"}}
        used = client.post("/api/templates/use", json=body).json()
        shown = client.post("/api/preview", json={"state": used["state"]}).json()
        assert shown.get("runs"), (one, shown)
        zero[one.id] = used["state"]["config"]["zero_optimization"]
        assert all(bar["fits"] for bar in shown["memory"]["bars"]), one
        # A template with a model replaces the workload that was planned before.
        subject = shown["memory"]["subject"]
        assert ("64 x 64" in subject) == (one.id == "lowest"), one
        assert ("rank 4" in subject) == (one.id == "lowest"), one
        assert ("rank 16" in subject) == ("lora" in one.id), one
    whole = ("sdxl-24", "sdxl-12", "sdxl-8", "nvme", "two-gpus")
    assert [zero[name]["stage"] for name in whole] == [2, 2, 2, 3, 3]
    assert zero["nvme"]["offload_optimizer"]["device"] == "nvme"
    assert client.post("/api/templates/use", json={"id": "none"}).status_code == 422
