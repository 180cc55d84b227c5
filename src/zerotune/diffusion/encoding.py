"""Encode a dataset before training, so that the VAE and text encoders need no device memory."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zerotune.backend.accelerator import current_accelerator
from zerotune.backend.distributed import ProcessGroup
from zerotune.backend.launch import Launch
from zerotune.decisions import Decision, announce
from zerotune.diffusion.data.cache import TensorCache
from zerotune.diffusion.data.caching import (
    CachedImages,
    Progress,
    cache_edits,
    cache_latents,
    cache_texts,
)

if TYPE_CHECKING:
    from zerotune.diffusion.data.preparation import PreparedImages
    from zerotune.diffusion.models.pipeline_family import PipelineFamily


def encode_dataset(
    images: PreparedImages,
    *,
    family: PipelineFamily,
    folder: str | os.PathLike[str],
    ranks: ProcessGroup | None = None,
    device: torch.device | str | None = None,
    batch_size: int = 4,
    progress: bool = True,
    timeout_s: float = 24 * 3600.0,
) -> CachedImages:
    """Cache a dataset's latents and text embeddings, and move the VAE and text encoders to the CPU.

    With several ranks, call this function on every rank; each rank encodes its share. Entries in
    ``folder`` from an earlier run with the same settings are reused; see ``cache_latents``.

    Args:
        images: Images with captions.
        family: Family whose frozen parts (VAE, text encoders) encode the dataset.
        folder: Folder for the caches.
        ranks: Processes that share the work, such as an engine's ``group``. By default, all
            processes of the launcher share the work; in that case, call this function before you
            create an engine.
        device: Device of the encoders; by default this rank's accelerator, if there is one.
        batch_size: Number of images or texts per batch.
        progress: Whether to show a progress bar on rank 0.
        timeout_s: Seconds that a finished rank waits for the slowest rank. A rank that dies is
            detected immediately.

    Returns:
        The dataset to train on.

    Raises:
        DataError: The family has no frozen parts, or an image is broken.
        InvalidValueError: Tags are shuffled anew at each use, so texts cannot be cached.
        CollectiveError: A rank did not finish within ``timeout_s``.
    """
    with ExitStack() as resources:
        chosen = ranks or _launched_ranks(resources)
        place = int(os.environ.get("LOCAL_RANK", chosen.rank))
        default = current_accelerator().device
        if default.type != "cpu":
            default = torch.device(default.type, place)
        return _encode(
            images,
            family=family,
            folder=folder,
            ranks=chosen,
            device=torch.device(device or default),
            batch_size=batch_size,
            shown=progress and chosen.rank == 0,
            timeout_s=timeout_s,
        )


def _launched_ranks(resources: ExitStack) -> ProcessGroup:
    if not dist.is_initialized() and Launch.from_environment().world_size == 1:
        return ProcessGroup.alone()
    # Under a launcher the group outlives close(), because the engine joins it later.
    group = ProcessGroup(backend=current_accelerator().communication_backend)
    resources.callback(group.close)
    return group


def _encode(
    images: PreparedImages,
    *,
    family: PipelineFamily,
    folder: str | os.PathLike[str],
    ranks: ProcessGroup,
    device: torch.device,
    batch_size: int,
    shown: bool,
    timeout_s: float,
) -> CachedImages:
    family.check_dataset(images)  # Before any image is encoded.
    latents = TensorCache(folder, settings=family.latent_settings())
    shared: dict[str, Any] = {
        "rank": ranks.rank,
        "world_size": ranks.world_size,
        "batch_size": batch_size,
        "release": None if family.parts is None else family.parts.release,
    }
    with _Bar("latents", shown) as report:
        shared |= {
            "progress": report,
            "barrier": lambda: ranks.barrier("use cached latents", timeout_s=timeout_s),
        }
        cache_latents(
            images,
            cache=latents,
            encode=lambda pixels: family.encode_images(pixels, device=device),
            encode_references=lambda pixels: family.encode_references(pixels, device=device),
            **shared,
        )
    with _Bar("captions", shown and not family.trains_texts) as report:
        shared |= {
            "progress": report,
            "barrier": lambda: ranks.barrier("use cached captions", timeout_s=timeout_s),
        }
        texts = _encode_captions(images, family=family, folder=folder, device=device, shared=shared)
    return CachedImages(images, latents=latents, texts=texts)


def _encode_captions(
    images: PreparedImages,
    *,
    family: PipelineFamily,
    folder: str | os.PathLike[str],
    device: torch.device,
    shared: dict[str, Any],
) -> TensorCache | None:
    """Return the cache of captions; ``None`` if training changes the text encoders."""
    if family.trains_texts:
        decision = Decision(
            "data.captions",
            "encoded once",
            "tokenised and encoded at each step",
            "text encoders are trained, so their embeddings change",
        )
        announce((decision,), rank=shared["rank"])
        return None
    cache = TensorCache(folder, settings=family.text_settings())
    if family.reads_references:
        cache_edits(
            images,
            cache=cache,
            encode=lambda captions, edited: family.encode_texts(
                captions, device=device, references=edited
            ),
            read=family.read_images,
            **shared,
        )
        return cache
    if family.texts_alone:
        shared = {**shared, "batch_size": 1}  # Unequal lengths, without a mask.
    cache_texts(
        images.texts(),
        cache=cache,
        encode=lambda captions: family.encode_texts(captions, device=device),
        **shared,
    )
    return cache


class _Bar:
    """A ``rich`` progress bar, which may be hidden."""

    def __init__(self, what: str, shown: bool) -> None:
        from rich.progress import Progress as Bar

        self._bar = Bar(disable=not shown)
        self._what = what

    def __enter__(self) -> Progress:
        self._bar.start()
        task = self._bar.add_task(f"encoding {self._what}", total=None)

        def report(done: int, total: int) -> None:
            self._bar.update(task, completed=done, total=total)

        return report

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
