"""Real photographs, and folders of small real files."""

from __future__ import annotations

import io
import random

import pytest
from PIL import Image
from sklearn.datasets import load_sample_images


@pytest.fixture(autouse=True)
def sizes_are_kept_apart(tmp_path, monkeypatch):
    """Give each test its own cache of image sizes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".user-cache"))


@pytest.fixture(scope="session")
def photos():
    """Return two photographs, 640x427, that ship with scikit-learn: a temple and a flower."""
    return [Image.fromarray(pixels) for pixels in load_sample_images().images]


@pytest.fixture(scope="session")
def encode():
    """Return a function that encodes an image as the bytes of a file."""

    def encoded(image, kind="PNG", **options):
        buffer = io.BytesIO()
        image.save(buffer, format=kind, **options)
        return buffer.getvalue()

    return encoded


@pytest.fixture(scope="session")
def cuttings(photos):
    """Return 300 cuttings of the photographs in 12 sizes."""
    draw = random.Random(3)
    kinds = [(draw.randint(12, 40), draw.randint(12, 40)) for _ in range(12)]
    found = []
    for number in range(300):
        width, height = kinds[draw.randrange(12)]
        left, top = draw.randrange(600 - width), draw.randrange(400 - height)
        found.append(photos[number % 2].crop((left, top, left + width, top + height)))
    return found


@pytest.fixture
def folder(tmp_path, cuttings):
    """Write the cuttings to subfolders with captions beside them, and four more, broken files."""
    root = tmp_path / "pictures"
    for number, image in enumerate(cuttings):
        place = root / f"part{number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        image.save(place / f"{number:03}.{('png', 'JPG', 'webp')[number % 3]}")
        (place / f"{number:03}.txt").write_text(f"cutting {number}\n")
    whole = (root / "part1" / "001.JPG").read_bytes()
    (root / "cut.jpg").write_bytes(whole[:-60])
    (root / "empty.jpg").write_bytes(b"")
    (root / "text.png").write_text("this is no image")
    (root / "gone.png").symlink_to("nowhere.png")
    (root / ".hidden.png").write_bytes(b"no")
    return root


BROKEN = ("cut.jpg", "empty.jpg", "gone.png", "text.png")


@pytest.fixture
def broken_names():
    return BROKEN
