"""Grids of clips, as animated PNG and as MP4."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.needs import needs
from zerotune.diffusion.grid import MP4, AnimatedPNG, clip_format, clips_to_grid
from zerotune.errors import InvalidValueError, MissingDependencyError
from zerotune.training.tracking import _pixels

CLIPS = torch.linspace(-1, 1, 2 * 3 * 4 * 5 * 7).view(2, 3, 4, 5, 7)


def test_an_animated_png_preserves_every_frame_exactly():
    frames = clips_to_grid(CLIPS, columns=2)
    assert [frame.size for frame in frames] == [(26, 13)] * 4
    with Image.open(io.BytesIO(AnimatedPNG(fps=20).encode(frames))) as found:
        assert (found.format, found.n_frames, found.info["loop"]) == ("PNG", 4, 0)
        for number, frame in enumerate(frames):
            found.seek(number)
            assert found.info["duration"] == 50
            assert np.array_equal(np.asarray(found.convert("RGB")), np.asarray(frame))
    with pytest.raises(InvalidValueError, match="pass images to images_to_grid"):
        clips_to_grid(CLIPS[:, :, 0], columns=1)
    with pytest.raises(InvalidValueError, match="fps"):
        AnimatedPNG(fps=0)


def test_an_mp4_accepts_frames_of_odd_sizes():
    av = needs("av")
    frames = [Image.new("RGB", (9, 7), (60 * n, 30, 90)) for n in range(4)]
    with av.open(io.BytesIO(MP4(fps=12).encode(frames))) as film:
        assert film.streams.video[0].average_rate == 12
        decoded = [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]
    assert [pixels.shape for pixels in decoded] == [(8, 10, 3)] * 4
    for number, pixels in enumerate(decoded):
        assert np.abs(pixels.astype(int) - (60 * number, 30, 90)).max() < 12
    assert clip_format(12)[0] == MP4(fps=12)


def test_without_pyav_clips_become_animated_pngs_and_mp4_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    format_, decision = clip_format(24)
    assert format_ == AnimatedPNG(fps=24)
    assert "PyAV, which is not installed" in decision.reason
    with pytest.raises(MissingDependencyError, match=r"zerotune\[video\]"):
        MP4().encode(clips_to_grid(CLIPS, columns=1))


def test_trackers_get_the_middle_frames_of_clips():
    middle = _pixels(CLIPS)
    assert middle.shape == (2, 5, 7, 3)
    assert torch.equal(middle, _pixels(CLIPS[:, :, 2]))
