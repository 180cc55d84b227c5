"""Publish an export on the Hugging Face Hub with a model card."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from zerotune.backend.adapters import LORA_FILE, PEFT_CONFIG
from zerotune.checkpoint.folders import check_replaceable, files_of_export
from zerotune.decisions import Decision
from zerotune.errors import CheckpointError, InvalidValueError, MissingDependencyError
from zerotune.plan.model import ResolvedPlan

CARD: Final = "README.md"
_SAMPLE_FOLDER: Final = "samples"
_PICTURES: Final = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".mp4")
_PLACE: Final = re.compile(r"(?<![\w/:.])~?(?:/[\w.@+-]+){2,}/?")
"""Local paths with at least two components, which are removed from a card."""
_SHARD: Final = re.compile(r"-\d{5}-of-\d{5}")


@attrs.frozen(kw_only=True)
class Card:
    """Title, license, plan, samples and other parts of a model card.

    Local paths are removed from the values.
    """

    title: str | None = None
    """Heading; by default the name of the repository."""
    base_model: str | None = None
    """Hub id of the base model."""
    license: str | None = None
    """License id on the Hub (``"apache-2.0"``, ``"other"``)."""
    tags: tuple[str, ...] = attrs.field(default=(), converter=tuple)
    plan: ResolvedPlan | None = None
    """Plan of the run, such as ``trainer.engine.plan``."""
    decisions: tuple[Decision, ...] = attrs.field(default=(), converter=tuple)
    """Decisions of the run, such as ``engine.decisions`` or ``exported.decisions``."""
    data: Mapping[str, Any] = attrs.field(factory=dict)
    """Facts about the training data to show in the card, such as
    ``{"images": 1200, "size": "1024 x 1024"}``."""
    samples: Mapping[str, str | os.PathLike[str]] = attrs.field(factory=dict)
    """Maps each caption to an image or clip file, which is uploaded with the card."""
    text: str = ""
    """Markdown text at the top of the card."""

    def markdown(self, repo_id: str, files: Iterable[str]) -> str:
        """Return the whole card as Markdown.

        Args:
            repo_id: Name of the repository, ``owner/name``.
            files: Paths of the files in the repository.

        Raises:
            MissingDependencyError: huggingface_hub is not installed.
        """
        parts = [f"# {self.title or repo_id.rpartition('/')[2]}", self.text.strip()]
        parts += [_loading_code(repo_id, sorted(files), self.base_model), self._samples()]
        parts += ["" if self.plan is None else _markdown_table("Training", _plan_rows(self.plan))]
        parts += [_markdown_table("Data", self.data), self._choices()]
        written = "\n\n".join(part for part in parts if part)
        return f"---\n{self._header(files)}\n---\n\n{written}\n"

    def _header(self, files: Iterable[str]) -> str:
        adapters = _holds_adapters(files)
        data = _hub().ModelCardData(
            base_model=self.base_model,
            license=self.license,
            library_name="diffusers",
            tags=[*dict.fromkeys(("zerotune", *(("lora",) if adapters else ()), *self.tags))],
        )
        text: str = data.to_yaml().strip()
        return text

    def _samples(self) -> str:
        lines = [
            f"![{_without_paths(caption)}]({name})\n*{_without_paths(caption)}*"
            for caption, name in zip(self.samples, self.sample_names(), strict=True)
        ]
        return "\n\n".join(["## Samples", *lines]) if lines else ""

    def sample_names(self) -> list[str]:
        """Return the paths of the samples in the repository."""
        return [
            f"{_SAMPLE_FOLDER}/{index:03d}{Path(path).suffix.lower()}"
            for index, path in enumerate(self.samples.values())
        ]

    def _check_samples(self) -> None:
        for caption, sample in self.samples.items():
            if Path(sample).suffix.lower() not in _PICTURES or not Path(sample).is_file():
                raise InvalidValueError(
                    "is not an image or clip that the Hub can display",
                    key=f"Card.samples[{caption!r}]",
                    value=Path(sample).name,
                    fix=f"use a file that ends with one of {', '.join(_PICTURES)}",
                )

    def _choices(self) -> str:
        lines = [f"- {_without_paths(str(each))}" for each in self.decisions if each.is_shown]
        return "\n".join(["## Chosen automatically", "", *dict.fromkeys(lines)]) if lines else ""


@attrs.frozen(kw_only=True)
class Published:
    """Address, commit and files of an upload."""

    url: str
    commit: str
    """Id of the commit."""
    files: tuple[str, ...]
    """Paths of the files in the repository."""


def publish(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    card: Card | None = None,
    private: bool = False,
    message: str | None = None,
    token: str | None = None,
    endpoint: str | None = None,
) -> Published:
    """Upload an export and its model card in one commit. Not collective.

    Call ``publish`` on one rank. All files become visible at once, through a single commit after
    the upload. The commit fails if the repository has changed since the upload began. An
    interrupted upload leaves the repository unchanged, and the next upload sends only missing
    files.

    Args:
        folder: Output of ``export_model``, ``export_pipeline``, ``export_adapters`` or
            ``export_merged``: a folder or a single file. Files that do not belong to the export are
            not uploaded.
        repo_id: Name of the repository, ``owner/name``; a missing repository is created.
        card: Content of the model card; loading instructions are added.
        private: Whether a new repository is private.
        message: Commit message.
        token: Hub token; by default the user's stored token.
        endpoint: URL of the Hub; by default huggingface_hub's endpoint.

    Returns:
        The commit and the published files.

    Raises:
        CheckpointError: The export is missing or incomplete, a file has changed since the export,
            or the upload failed.
        InvalidValueError: A sample is not an image or clip, or the repository name is invalid.
        MissingDependencyError: huggingface_hub is not installed.
    """
    hub, card = _hub(), card or Card()
    top = Path(folder).absolute()
    local = _export_files(top)
    card._check_samples()
    samples = dict(zip(card.sample_names(), map(Path, card.samples.values()), strict=True))
    uploads = {**local, **samples}
    api = hub.HfApi(endpoint=endpoint, token=token)
    content = card.markdown(repo_id, local).encode()
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        before = api.repo_info(repo_id)
        there = [each.rfilename for each in before.siblings or ()]
        operations = [
            hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=source)
            for name, source in {**uploads, CARD: content}.items()
        ]
        # Delete weights of an earlier upload that would be loaded instead of these.
        stems = {_weights_stem(name) for name in local if name.endswith(".safetensors")}
        operations += [
            hub.CommitOperationDelete(path_in_repo=name)
            for name in there
            if name not in local and ".safetensors" in name and _weights_stem(name) in stems
        ]
        done = api.create_commit(
            repo_id,
            operations,
            commit_message=message or f"Upload {top.name}",
            parent_commit=before.sha,
        )
    except hub.errors.HFValidationError as error:
        raise InvalidValueError(
            "is not a repository name", key="repo_id", value=repo_id, fix='write "owner/name"'
        ) from error
    except Exception as error:  # from huggingface_hub, its HTTP library or the system
        # If sending a file fails, a bare RuntimeError names only the file; its cause says why.
        cause = error.__cause__ if type(error) is RuntimeError and error.__cause__ else error
        reason = _without_paths(str(cause)).strip().replace("\n", " ")
        raise CheckpointError(
            f"the upload failed; the repository is unchanged ({type(error).__name__}: {reason})",
            key=repo_id,
            fix="try again; files that were already uploaded are not sent again",
        ) from error
    return Published(url=done.commit_url, commit=done.oid, files=(*sorted(uploads), CARD))


def _hub() -> Any:
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        importlib.import_module("huggingface_hub.errors")
    except ImportError as error:
        raise MissingDependencyError(
            f"is required to publish and could not be imported ({error})",
            key="huggingface_hub",
            fix="pip install huggingface_hub",
        ) from error
    return hub


# -- The files to upload.


def _export_files(top: Path) -> dict[str, Path]:
    """Return the files of an export by their names in the repository."""
    if not top.exists():
        raise CheckpointError("does not exist, so it cannot be published", key=str(top))
    if top.is_file():
        check_replaceable(top)
        return {top.name: top}
    names = files_of_export(top)
    single = top / LORA_FILE
    if names is None and single.is_file():
        return _export_files(single)
    there = sorted(name for name in names or () if (top / name).is_file())
    if not there or len(there) < len(names or ()):
        raise CheckpointError(
            "contains no complete zerotune export, or a file has changed since the export",
            key=str(top),
            fix="export again, or upload the folder with huggingface_hub.upload_folder",
        )
    return {name: top / name for name in there}


def _weights_stem(name: str) -> str:
    whole = name.removesuffix(".index.json").removesuffix(".safetensors")
    return _SHARD.sub("", whole)


def _holds_adapters(files: Iterable[str]) -> bool:
    names = [Path(name).name for name in files]
    whole = {"config.json", "model_index.json"} & set(names)
    return LORA_FILE in names or PEFT_CONFIG in names or not whole


# -- The text of the card.


def _loading_code(repo_id: str, files: Sequence[str], base: str | None) -> str:
    start = base or "the model it was trained on"
    names = {Path(name).name for name in files}
    if "model_index.json" in files:
        code = f'DiffusionPipeline.from_pretrained("{repo_id}")'
        lines = ["from diffusers import DiffusionPipeline", "", f"pipeline = {code}"]
    elif PEFT_CONFIG in names:
        lines = ["from peft import PeftModel", ""]
        lines += [f'model = PeftModel.from_pretrained(model, "{repo_id}")']
    elif not _holds_adapters(files):
        lines = ["from diffusers import AutoModel", ""]
        lines += [f'model = AutoModel.from_pretrained("{repo_id}")']
    else:
        lines = ["from diffusers import DiffusionPipeline", ""]
        lines += [f'pipeline = DiffusionPipeline.from_pretrained("{start}")']
        lines += [f'pipeline.load_lora_weights("{repo_id}", weight_name="{files[0]}")']
    return "\n".join(["```python", *lines, "```"])


def _plan_rows(plan: ResolvedPlan) -> dict[str, Any]:
    rows: dict[str, Any] = {
        "engine": f"ZeRO-{plan.stage}" if plan.uses_deepspeed else "plain",
        "precision": plan.precision,
        "processes": plan.world_size,
        "samples per step": plan.train_batch_size,
        "gradient accumulation": plan.gradient_accumulation_steps,
        "gradient clipping": plan.gradient_clipping or "off",
    }
    if plan.optimizer is not None:
        named = ", ".join(f"{key} {value}" for key, value in plan.optimizer.params.items())
        rows["optimizer"] = f"{plan.optimizer.name} ({named})"
    if plan.scheduler is not None:
        rows["schedule"] = plan.scheduler.name
    return rows


def _markdown_table(title: str, rows: Mapping[str, Any]) -> str:
    if not rows:
        return ""
    lines = [f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items()]
    return "\n".join([f"## {title}", "", "| | |", "|---|---|", *lines])


def _cell(value: Any) -> str:
    return _without_paths(str(value)).replace("|", "\\|").replace("\n", " ")


def _without_paths(text: str) -> str:
    return _PLACE.sub("…", text)
