"""Publish an export on the Hugging Face Hub, with a model card, in one commit.

    python examples/recipes/publish.py my-unet owner/name --base OWNER/BASE --license apache-2.0 \
        --sample "a red fox=fox.png"

FOLDER is the output of export_model, export_pipeline or export_adapters: a folder or a single file.
Other files in the folder are not uploaded. The commit fails if the repository has changed since the
upload began, and an interrupted upload leaves the repository unchanged. The card says how to load
the model; to add facts about the training, pass their Markdown text.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCardData

from zerotune.checkpoint.marks import check_replaceable, files_of_export

CARD = "README.md"
_SHARD = re.compile(r"-\d{5}-of-\d{5}")


def publish(
    folder: Path, repo_id: str, *, api: HfApi, card: str, samples: Mapping[str, Path]
) -> Any:
    """Upload an export, its card and its samples; return huggingface_hub's description."""
    local = exported(folder.absolute())
    api.create_repo(repo_id, exist_ok=True)
    before = api.repo_info(repo_id)
    uploads = {**local, **{f"samples/{path.name}": path for path in samples.values()}}
    operations: list[Any] = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=source)
        for name, source in {**uploads, CARD: card.encode()}.items()
    ]
    # Delete weights of an earlier upload that would be loaded instead of these.
    stems = {stem(name) for name in local if name.endswith(".safetensors")}
    operations += [
        CommitOperationDelete(path_in_repo=name)
        for name in (each.rfilename for each in before.siblings or ())
        if name not in local and ".safetensors" in name and stem(name) in stems
    ]
    message = f"Upload {folder.name}"
    return api.create_commit(repo_id, operations, commit_message=message, parent_commit=before.sha)


def exported(path: Path) -> dict[str, Path]:
    """Return the files of an export by their names in the repository; refuse anything else."""
    if path.is_file():
        check_replaceable(path)
        return {path.name: path}
    names = files_of_export(path) or frozenset()
    missing = sorted(name for name in names if not (path / name).is_file())
    if not names or missing:
        raise SystemExit(f"{path} is no complete export: {', '.join(missing) or 'export again'}")
    return {name: path / name for name in sorted(names)}


def stem(name: str) -> str:
    """Return the common part of the names of a model's weight files."""
    return _SHARD.sub("", name.removesuffix(".index.json").removesuffix(".safetensors"))


def card_of(
    repo_id: str,
    files: Iterable[str],
    *,
    base: str | None,
    license: str | None,  # noqa: A002 - the Hub's name
    text: str,
    samples: Mapping[str, Path],
) -> str:
    """Return the card: how to load the files, the samples and your text."""
    names = sorted(files)
    if "model_index.json" in names:
        code = f'DiffusionPipeline.from_pretrained("{repo_id}")'
    elif "config.json" in names:
        code = f'AutoModel.from_pretrained("{repo_id}")'
    else:
        code = f'DiffusionPipeline.from_pretrained("{base or "the model it was trained on"}")'
        code += f'\npipeline.load_lora_weights("{repo_id}", weight_name="{names[0]}")'
    adapters = "load_lora" in code
    kind = "AutoModel" if "AutoModel" in code else "DiffusionPipeline"
    name = "model" if kind == "AutoModel" else "pipeline"
    tags = ["zerotune", "lora"] if adapters else ["zerotune"]
    head = ModelCardData(base_model=base, license=license, library_name="diffusers", tags=tags)
    loading = f"```python\nfrom diffusers import {kind}\n\n{name} = {code}\n```"
    shown = [f"![{said}](samples/{path.name})\n*{said}*" for said, path in samples.items()]
    title = f"# {repo_id.rpartition('/')[2]}"
    parts = [title, loading, *shown, text.strip()]
    return f"---\n{head.to_yaml().strip()}\n---\n\n" + "\n\n".join(filter(None, parts)) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    said = (each.partition("=") for each in options.sample)
    samples = {caption: Path(file) for caption, _, file in said}
    card = card_of(
        options.repository, exported(options.folder.absolute()), base=options.base,
        license=options.license, text=options.text, samples=samples,
    )  # fmt: skip
    api = HfApi(endpoint=options.endpoint)
    done = publish(options.folder, options.repository, api=api, card=card, samples=samples)
    print(done.commit_url)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder or file of an export")
    parser.add_argument("repository", help="owner/name on the Hub")
    parser.add_argument("--base", help="Hub id of the base model")
    parser.add_argument("--license", help="license id on the Hub")
    parser.add_argument("--text", default="", help="Markdown text at the end of the card")
    parser.add_argument("--sample", action="append", default=[], metavar="CAPTION=FILE")
    parser.add_argument("--endpoint", help="URL of the Hub")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
