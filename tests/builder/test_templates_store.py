"""User templates: safe names and complete files."""

from __future__ import annotations

import json

import pytest

from tests.builder.states import CHOSEN, PLAN, state
from zerotune.builder.forms import FormState
from zerotune.builder.templates import BUILTIN, Template, TemplateStore, normalise_name, user_folder
from zerotune.errors import InvalidValueError, PlanFileError
from zerotune.plan.families import family_names


@pytest.fixture
def store(tmp_path):
    return TemplateStore(tmp_path / "templates")


def template(name="mine", clipping=1.0):
    return Template(name=name, state=FormState(config={**PLAN, "gradient_clipping": clipping}))


@pytest.mark.parametrize(
    "name",
    ["", " ", "../up", "a/b", "a\\b", ".hidden", "CON", "lpt1.x", "a\0", "x" * 61, "ü" * 60 + "é",
     "trailing.", "a\nb", 'a"b', None, 3, "\ud800", "a:b"],
)  # fmt: skip
def test_names_that_are_not_file_names_are_refused(name, store):
    with pytest.raises(InvalidValueError):
        normalise_name(name)
    with pytest.raises(InvalidValueError):
        store.get(name)


@pytest.mark.parametrize("name", ["SDXL 24 GB", "été", "a", "v1.2 (test)", "東京", "console"])
def test_ordinary_names_are_kept(name, store):
    stored = store.put(template(name))
    assert store.get(name) == stored
    assert [each.name for each in store.all()] == [normalise_name(name)]


def test_composed_and_decomposed_accents_are_the_same_name():
    assert normalise_name("e\u0301te") == "éte"


def test_a_template_of_the_same_name_is_replaced(store):
    store.put(template())
    second = store.put(template("MINE", clipping=0.1))
    assert store.all() == [second]
    assert (second.name, store.get("mine")) == ("mine", second)
    store.delete("Mine")
    with pytest.raises(PlanFileError, match="not the name of a template"):
        store.delete("mine")


def test_foreign_files_in_the_folder_are_ignored(store):
    store.put(template())
    for name, text in (("a.json", "{"), ("b.json", "[]"), ("c.json", "\x00"), ("d.txt", "{}")):
        (store.folder / name).write_text(text)
    assert [each.name for each in store.all()] == ["mine"]


def test_templates_are_stored_in_the_users_configuration_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert user_folder() == tmp_path / "zerotune" / "templates"
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_folder() == tmp_path / ".config" / "zerotune" / "templates"


class TestOverHttp:
    def save(self, client, **body):
        return client.post("/api/templates/save", json={"state": state(), **body})

    def test_a_template_can_be_saved_used_and_deleted(self, client, tmp_path):
        saved = self.save(client, name="first").json()
        stored = json.loads((tmp_path / "templates" / "first.json").read_text())
        assert stored["state"]["config"] == PLAN
        assert client.get("/api/templates").json()["own"] == [saved]
        used = client.post("/api/templates/use", json={"name": "first"}).json()
        assert used["state"] == saved["state"]
        assert client.post("/api/templates/delete", json={"name": "first"}).is_success
        assert client.get("/api/templates").json()["own"] == []
        assert client.post("/api/templates/use", json={"name": "first"}).status_code == 404

    def test_an_export_can_be_imported(self, client):
        exported = self.save(client, name="first").json()
        text = json.dumps({**exported, "name": "copy"})
        imported = client.post("/api/templates/import", json={"text": text}).json()
        assert imported["state"] == exported["state"]
        assert client.post("/api/templates/import", json={"text": text}).json() == imported
        other = client.post("/api/templates/import", json={"text": json.dumps(PLAN)})
        assert other.status_code == 422

    def test_a_name_that_is_not_a_file_name_is_refused(self, client):
        assert self.save(client, name="../first").status_code == 422

    def test_built_in_templates_are_of_known_families(self):
        assert {one.setup.get("family") for one in BUILTIN} <= {None, *family_names()}
        assert len(BUILTIN) == 12

    def test_every_built_in_template_fits_its_machine(self, client):
        for one in client.get("/api/templates").json()["builtin"]:
            body = {"id": one["id"], "setup": {**CHOSEN, "lora": "4", "resolution": "64"}}
            used = client.post("/api/templates/use", json=body).json()
            shown = client.post("/api/preview", json={"state": used["state"]}).json()
            assert shown.get("runs"), (one, shown)
            assert all(bar["fits"] for bar in shown["memory"]["bars"]), one
            # A template with a model replaces the workload that was planned before.
            subject = shown["memory"]["subject"]
            assert ("64 x 64" in subject) == (one["id"] == "lowest"), one
            assert ("rank 4" in subject) == (one["id"] == "lowest"), one
            assert ("rank 16" in subject) == ("lora" in one["id"]), one
        assert client.post("/api/templates/use", json={"id": "none"}).status_code == 422

    def test_frames_count_only_for_video_models(self, client):
        subjects = {}
        for family in ("wan-1.3b", "sdxl"):
            setup = {**CHOSEN, "family": family, "resolution": "256", "frames": "17"}
            body = {"state": {"config": PLAN, "setup": setup}}
            shown = client.post("/api/preview", json=body).json()
            subjects[family] = shown["memory"]["subject"]
            assert shown["effective"]["setup.frames"] == (81 if family == "wan-1.3b" else None)
        assert "17 frames of 256 x 256" in subjects["wan-1.3b"]
        assert "frames" not in subjects["sdxl"], "what is not shown says nothing"
