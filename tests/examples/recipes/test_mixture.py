"""The mixture recipe repeats and captions its sets as their folders say."""

from __future__ import annotations

from examples.recipes.mixture import mixture, parse

from tests.examples.recipes.starting import photographs


def test_sets_are_repeated_and_captioned_as_their_folders_say(tmp_path):
    for name, photos in {"4_zoe": ["astronaut"], "1_people": ["chelsea", "coffee"]}.items():
        photographs(tmp_path / name, {photo: photo for photo in photos})
    line = ["--base", "none", "--data", str(tmp_path), "--output", "none", "--trigger"]
    mixed = mixture(parse([*line, "zoe=ohwx, ", "--area", "256", "--bucket-step", "4"]))
    captions = [mixed.source.item(index).caption for index in range(len(mixed))]
    assert sorted(captions) == ["chelsea", "coffee", *["ohwx, astronaut"] * 4]
