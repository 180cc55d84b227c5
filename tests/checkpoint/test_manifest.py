"""The manifest: round trip, alterations, foreign files."""

from __future__ import annotations

import json

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.samples import sample_manifest
from zerotune.backend.fragments import StateFormat
from zerotune.backend.optimizers.classes import AdamW8BitStates
from zerotune.checkpoint.manifest import Manifest
from zerotune.errors import CheckpointCorruptError, CheckpointError

TEXT = sample_manifest().to_json()


def test_a_manifest_survives_a_round_trip():
    assert Manifest.from_json(TEXT) == sample_manifest()
    assert Manifest.from_json(TEXT).to_json() == TEXT


def test_numbers_survive_a_round_trip_exactly():
    values = {"lr": 0.1 + 0.2, "tiny": 5e-324, "large": 2**63 - 1, "text": "ü"}
    manifest = sample_manifest(extra=values)
    assert Manifest.from_json(manifest.to_json()).extra == values


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, len(TEXT) - 1), character=st.characters(codec="ascii"))
def test_any_altered_character_is_detected(position, character):
    altered = TEXT[:position] + character + TEXT[position + 1 :]
    try:
        manifest = Manifest.from_json(altered)
    except CheckpointError:
        return
    # White space between values may change without changing their meaning.
    assert manifest == sample_manifest()


@settings(max_examples=100, deadline=None)
@given(st.one_of(st.text(), st.recursive(st.none() | st.integers(), st.lists).map(json.dumps)))
def test_text_that_is_not_a_manifest_is_refused(text):
    with pytest.raises(CheckpointCorruptError):
        Manifest.from_json(text)


@pytest.mark.parametrize("length", [0, 1, 100, len(TEXT) - 2])
def test_a_truncated_manifest_is_refused(length):
    with pytest.raises(CheckpointCorruptError, match="is not JSON"):
        Manifest.from_json(TEXT[:length], source="here")


def test_a_newer_format_is_refused_with_the_version_that_can_be_read():
    newer = TEXT.replace('"version": 3', '"version": 4')
    with pytest.raises(
        CheckpointError, match=r"format version 4, but this zerotune version reads only 2 and 3"
    ):
        Manifest.from_json(newer)


def resigned(change):
    """Return a manifest that was altered on purpose, with a valid hash."""
    from zerotune.checkpoint import manifest as module

    content = json.loads(TEXT)
    del content["sha256"]
    change(content)
    return json.dumps({**content, "sha256": module._content_digest(content)})


def test_a_manifest_of_version_2_has_states_in_fp32():
    def older(content):
        content["version"] = 2
        del content["formats"]

    manifest = Manifest.from_json(resigned(older))
    assert manifest == sample_manifest()
    assert manifest.format_of("exp_avg") == StateFormat()


def coded(content, **formats):
    content["formats"] = {n: attrs.asdict(f) for n, f in AdamW8BitStates.formats.items()}
    content["formats"] |= formats
    content["parameters"][0]["states"] = list(AdamW8BitStates.formats)


def test_formats_of_states_survive_a_round_trip():
    manifest = Manifest.from_json(resigned(coded))
    assert manifest.formats == AdamW8BitStates.formats
    assert Manifest.from_json(manifest.to_json()) == manifest


@pytest.mark.parametrize(
    "form",
    [{"dtype": "int64"}, {"dtype": "uint8"}, {"codebook": "e5m3"}, {"block": 0}, {"block": 256}],
    ids=str,
)
def test_an_unknown_format_of_a_state_is_refused(form):
    with pytest.raises(CheckpointCorruptError, match="formats"):
        Manifest.from_json(resigned(lambda content: coded(content, exp_avg=form)))


@pytest.mark.parametrize("codebook", ["dynamic tree", "secret"])
def test_codes_of_another_codebook_are_refused_instead_of_misread(codebook):
    form = {"dtype": "uint8", "codebook": codebook}
    with pytest.raises(CheckpointError, match=f"{codebook}.*it reads e4m3 and e5m3"):
        Manifest.from_json(resigned(lambda content: coded(content, exp_avg=form)))


def test_codes_of_a_parameter_without_scales_are_refused():
    def change(content):
        coded(content)
        content["parameters"][0]["states"] = ["exp_avg"]

    with pytest.raises(CheckpointCorruptError, match="'weight' has codes without scales"):
        Manifest.from_json(resigned(change))


@pytest.mark.parametrize("name", ["../elsewhere", "/etc/passwd", "", ".."])
def test_a_file_name_outside_the_folder_is_refused(name):
    text = resigned(lambda content: content["files"][0].update(name=name))
    with pytest.raises(CheckpointCorruptError, match="not a plain file name"):
        Manifest.from_json(text)


@pytest.mark.parametrize("key", ["plan", "files", "state", "world_size"])
def test_a_missing_key_is_named(key):
    with pytest.raises(CheckpointCorruptError, match=key):
        Manifest.from_json(resigned(lambda content: content.pop(key)))


@pytest.mark.parametrize("scale", [0, -2.0, None, "1"])
@pytest.mark.parametrize("name", ["scale", "cur_scale"])
def test_a_loss_scale_that_would_divide_by_zero_is_refused(name, scale):
    text = resigned(lambda content: content["state"].update(loss_scaler={name: scale}))
    with pytest.raises(CheckpointCorruptError, match=name):
        Manifest.from_json(text)


@pytest.mark.parametrize("name", ["", "two words", "step", "exp_avg"])
def test_an_unknown_counter_of_a_parameter_is_refused(name):
    text = resigned(lambda content: content["parameters"][0].update(scalars={name: 1}))
    with pytest.raises(CheckpointCorruptError, match=r"'weight' has the unknown counter"):
        Manifest.from_json(text)


def test_a_missing_manifest_is_named(tmp_path):
    with pytest.raises(CheckpointCorruptError, match=r"manifest\.json.*cannot be read"):
        Manifest.read(tmp_path)
