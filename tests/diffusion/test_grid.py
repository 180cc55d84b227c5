"""Grids of clips, as animated PNG."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from zerotune.diffusion.grid import animated_png, clips_to_grid
from zerotune.errors import InvalidValueError
from zerotune.training.tracking import _pixels

CLIPS = torch.linspace(-1, 1, 2 * 3 * 4 * 5 * 7).view(2, 3, 4, 5, 7)


def test_an_animated_png_preserves_every_frame_exactly():
    frames = clips_to_grid(CLIPS, columns=2)
    assert [frame.size for frame in frames] == [(26, 13)] * 4
    with Image.open(io.BytesIO(animated_png(frames, fps=20))) as found:
        assert (found.format, found.n_frames, found.info["loop"]) == ("PNG", 4, 0)
        for number, frame in enumerate(frames):
            found.seek(number)
            assert found.info["duration"] == 50
            assert np.array_equal(np.asarray(found.convert("RGB")), np.asarray(frame))
    with pytest.raises(InvalidValueError, match="pass images to images_to_grid"):
        clips_to_grid(CLIPS[:, :, 0], columns=1)


def test_trackers_get_the_middle_frames_of_clips():
    middle = _pixels(CLIPS)
    assert middle.shape == (2, 5, 7, 3)
    assert torch.equal(middle, _pixels(CLIPS[:, :, 2]))
