"""The verdict on a plan, and the key order of applied files."""

from __future__ import annotations

import pytest

from tests.builder.states import state


def preview(client, **parts):
    return client.post("/api/preview", json={"state": state(**parts)}).json()


class TestVerdict:
    @pytest.mark.parametrize(
        ("setup", "text"),
        [
            ({}, "runs and fits"),
            ({"vram": "2"}, "runs, but does not fit: GPU"),
            ({"vram": "2", "ram": "2"}, "runs, but does not fit: GPU, RAM"),
            ({"family": ""}, "runs, memory not estimated"),
            ({"resolution": "large"}, "cannot run"),
            ({"vram": "much"}, "cannot run"),
            ({"lora": "x"}, "cannot run"),
            ({"world_size": "0"}, "cannot run"),
            ({"base_dtype": "nf4"}, "cannot run"),
        ],
    )
    def test_the_verdict_counts_findings_setup_and_fit(self, client, setup, text):
        found = preview(client, setup=setup)
        assert found["verdict"]["text"] == text
        stopped = text == "cannot run"
        assert any(each["severity"] == "error" for each in found["messages"]) == stopped
        assert found["runs"] != stopped
        assert ("running" in found["outputs"]) != stopped
        assert (found["title"] is None) == stopped

    def test_nothing_is_estimated_for_an_invalid_setup(self, client):
        memory = preview(client, setup={"resolution": "large"})["memory"]
        assert "bars" not in memory
        assert "can be estimated once" in memory["reason"]

    def test_a_setup_error_prevents_applying(self, client_of):
        seen = []
        client = client_of(on_apply=seen.append)
        answer = client.post("/api/apply", json={"state": state(setup={"world_size": "many"})})
        assert answer.status_code == 409
        assert "setup.world_size" in answer.json()["error"]
        assert seen == []

    def test_predicted_seconds_come_with_their_rates(self, client):
        time = preview(client, setup={"card": "RTX 3090, 24 GiB"})["time"]
        assert time["rates"] == "rates catalogued for RTX 3090 (24 GiB)"
        other = preview(client, setup={"card": "RTX 4090, 24 GiB"})["time"]
        assert other["seconds"] != time["seconds"]
        assert preview(client, setup={"vram": "much"})["time"] is None
