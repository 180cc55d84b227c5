"""Write the pages of the API reference from the packages' exports, one page per name.

Sphinx calls ``write`` before it reads the pages; the pages are not committed.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Container, Iterator
from functools import cache
from pathlib import Path
from typing import Any

FACADES = (
    "zerotune",
    "zerotune.plan",
    "zerotune.optim",
    "zerotune.platform",
    "zerotune.offload",
    "zerotune.ema",
    "zerotune.checkpoint",
    "zerotune.diffusion",
    "zerotune.diffusion.data",
    "zerotune.training",
)
"""Every documented package that has an ``__all__``."""
BELOW = {
    "zerotune.backend": (
        "engine.Engine",
        "deepspeed.engine.DeepSpeedEngine",
        "plain.PlainEngine",
        "host.engine.HostEngine",
        "deepspeed.external.AttachedEngine",
        "master_weights.MasterWeights",
    ),
    "zerotune.builder": ("app.create_app",),
    "zerotune.errors": (),
    "zerotune.plan": ("charts.plot_memory", "read.SHORT_NAMES"),
    "zerotune.diffusion": ("models.probe.probe",),
}
"""Names that are documented under the module that defines them, by package."""

_PLAN, _DATA, _MODELS = "zerotune.plan", "zerotune.diffusion.data", "zerotune.diffusion.models"
RELATED = {
    "zerotune.plan.DeepSpeedPlan": {
        f"{_PLAN}.plan": "ResolvedPlan Advice",
        f"{_PLAN}.sections": "ZeroSection OffloadSection AioSection Bf16Section Fp16Section "
        "OptimizerSection SchedulerSection LaunchSection",
        f"{_PLAN}.candidates": "Budget Candidate",
        f"{_PLAN}.rules.rule": "Finding Rule",
        f"{_PLAN}.rules.table": "all_rules",
        f"{_PLAN}.optimizer.choices": "OptimizerChoice SchedulerChoice",
    },
    "zerotune.plan.ModelFacts": {
        f"{_PLAN}.facts": "ParameterFacts",
        f"{_PLAN}.work": "ActivationFacts ActivationCost",
        f"{_PLAN}.families": "family family_names",
    },
    "zerotune.plan.Workload": {
        f"{_PLAN}.plan": "MemoryEstimate",
        f"{_PLAN}.memory.items": "MemoryItem MemoryPeak",
    },
    "zerotune.plan.plan_document": {f"{_PLAN}.write": "PlanDocument SavedPlan"},
    "zerotune.optim.OptimizerResolver": {
        f"{_PLAN}.optimizer.capability": "Capability",
        f"{_PLAN}.optimizer.catalogue": "OPTIMIZERS",
        f"{_PLAN}.optimizer.entries": "OptimizerEntry Parameter",
        f"{_PLAN}.optimizer.schedules": "SCHEDULERS SchedulerEntry",
    },
    "zerotune.platform.Platform": {
        "zerotune.platform.facts": "Accelerator DeepSpeedSupport Device HostMemory",
    },
    "zerotune.platform.detect_platform": {
        "zerotune.platform.detect": "MachineProbe TorchFacts Cores",
    },
    "zerotune.offload.OffloadManager": {
        "zerotune.offload.manager": "Lease",
        "zerotune.offload.root": "SwapRoot",
        "zerotune.offload.lease": "find_leases FoundLease",
        "zerotune.offload.record": "LeaseRecord",
        "zerotune.offload.space": "swap_needs SwapNeeds",
    },
    "zerotune.offload.cleanup_stale_swap": {"zerotune.offload.cleaning": "CleanupReport Leftover"},
    "zerotune.ema.EMAShadow": {
        "zerotune.ema.decay": "DecaySchedule ConstantDecay",
        "zerotune.ema.stores": "ShadowStore HostStore",
    },
    "zerotune.checkpoint.save_checkpoint": {
        "zerotune.checkpoint.contents": "ShadowLike",
        "zerotune.checkpoint.manifest": "Manifest",
        "zerotune.checkpoint.folders": "prune step_folder verify_checkpoint",
    },
    "zerotune.checkpoint.load_checkpoint": {
        "zerotune.checkpoint.load": "CheckpointContents",
    },
    "zerotune.checkpoint.BackgroundSaver": {"zerotune.checkpoint.save": "PendingCheckpoint"},
    "zerotune.checkpoint.export_adapters": {
        "zerotune.checkpoint.export.adapters": "ExportedAdapters",
    },
    "zerotune.checkpoint.export_model": {
        "zerotune.checkpoint.export.model": "export_checkpoint",
    },
    "zerotune.diffusion.add_lora": {"zerotune.backend.adapters": "AdapterFacts"},
    "zerotune.diffusion.validation_loss": {"zerotune.diffusion.held_out": "HeldOutLoss"},
    "zerotune.diffusion.DenoisingObjective": {"zerotune.diffusion.losses": "Loss"},
    "zerotune.diffusion.OffsetNoise": {
        "zerotune.diffusion.noise": "Noise DrawnNoise GaussianNoise",
    },
    "zerotune.diffusion.FlowMatchingObjective": {
        "zerotune.diffusion.objective": "Objective LevelObjective",
        "zerotune.diffusion.noise_schedule": "Shift ResolutionShift",
    },
    "zerotune.diffusion.images_to_grid": {
        "zerotune.diffusion.grid": "clips_to_grid animated_png",
    },
    "zerotune.diffusion.load_pretrained": {
        "zerotune.diffusion.pretrained": "Pretrained",
        "zerotune.diffusion.known_families": "FAMILIES",
        f"{_MODELS}.pipeline": "FrozenParts",
    },
    "zerotune.diffusion.PipelineFamily": {
        f"{_MODELS}.family": "Family PromptFamily LabelFamily Conditioning Denoiser Drawing",
        f"{_MODELS}.latents": "Packing Tokens Unpacked",
        f"{_MODELS}.declared": "AuraFlow Chroma Flux Flux2 Flux2Klein FluxKontext HiDream "
        "HunyuanVideo Krea2 LTXVideo Lumina2 PixArtAlpha PixArtSigma QwenImage QwenImageEdit "
        "QwenImageEditPlus Sana StableDiffusion StableDiffusion3 StableDiffusionXL Wan "
        "WanLowNoise ZImage",
    },
    f"{_DATA}.AspectBuckets": {f"{_DATA}.buckets": "Bucket BucketAssignment Placement"},
    f"{_DATA}.PreparedImages": {
        f"{_DATA}.cache": "TensorCache CacheSettings hash_weights",
        f"{_DATA}.caching": "CachedImages cache_latents cache_texts cache_edits",
    },
    f"{_DATA}.ImageFolder": {
        f"{_DATA}.sources": "ImageSource ImageItem JoinedSources RepeatedSource",
        f"{_DATA}.images": "BrokenImage",
    },
    f"{_DATA}.ClipFolder": {
        f"{_DATA}.clips": "ClipSource",
        f"{_DATA}.clip_buckets": "ClipItem",
    },
    "zerotune.diffusion.DataStream": {
        f"{_DATA}.batches": "Batch Captions stack_samples",
        f"{_DATA}.streams": "BatchStream RepeatedBatches",
        f"{_DATA}.order": "Draw SampleOrder derive_seed",
    },
    f"{_DATA}.BucketStream": {
        f"{_DATA}.streams": "BucketedDataset",
        f"{_DATA}.order": "BucketOrder",
    },
    "zerotune.training.Trainer": {
        "zerotune.training.trainer": "RunOptions",
        "zerotune.training.view": "RunView SampleOptions",
        "zerotune.training.report": "Report",
        "zerotune.training.step": "TrainStep NonFinite NonFinitePolicy RaiseNonFinite",
        "zerotune.training.memory": "expected_memory",
        "zerotune.backend.compilation": "Compilation",
    },
    "zerotune.training.Callback": {"zerotune.training.events": "StepMetrics"},
    "zerotune.training.MetricsFile": {"zerotune.training.events": "read_metrics"},
    "zerotune.training.ValidationImages": {"zerotune.training.validate": "Validation"},
    "zerotune.training.EmbeddedPlan": {"zerotune.training.embedded": "EngineSchedule"},
    "zerotune.training.prepare": {
        "zerotune.training.setup": "build_engine",
    },
}
"""Related names for each page, by module: types of returned values and of further arguments."""
FRONT_ENDS = "zerotune.front_ends"
FOR_FRONT_ENDS = {
    "zerotune.decisions": "Decision Log worst_first",
    f"{_PLAN}.source": "parse_any read_text tolerated with_named_files wrapper_of",
    f"{_PLAN}.read": "canonical_path plan_from_mapping read_partly read_whole",
    f"{_PLAN}.write": "format_of launchable",
    f"{_PLAN}.values": "AUTO Boolean Integer",
    f"{_PLAN}.section": "join leaves modelled value_at",
    f"{_PLAN}.sections": "OFFLOAD_DEVICES PRECISIONS only_precision",
    f"{_PLAN}.facts": "STORAGES",
    f"{_PLAN}.context": "Context",
    f"{_PLAN}.settings": "read_launch with_launch",
    f"{_PLAN}.plan": "raised",
    f"{_PLAN}.schema": "whole_schema",
    f"{_PLAN}.families": "as_facts model_family",
    f"{_PLAN}.remedies": "Remedy",
    f"{_PLAN}.memory.items": "DURING EMAPlace",
    f"{_PLAN}.memory.estimate": "workload_of",
    f"{_PLAN}.memory.rates": "CARDS card_platform known_rates",
    f"{_PLAN}.memory.time": "StepTime step_time",
    f"{_PLAN}.text.plan": "describe",
    f"{_PLAN}.text.memory": "Fit fits estimate_data subject",
    f"{_PLAN}.text.advice": "candidate_data candidates_data rank_budget seconds_words",
    f"{_PLAN}.optimizer.capability": "installed_packages missing_package",
    f"{_PLAN}.optimizer.names": "BY_WORD",
}
"""Further names for front ends, by module; the builder uses no others."""


def homes() -> dict[str, list[str]]:
    """Map the public path of each exported object's page to its other public paths."""
    elsewhere = {f"{package}.{name}" for package, names in BELOW.items() for name in names}
    found: dict[tuple[str, int], list[str]] = {}
    for package in FACADES:
        module = importlib.import_module(package)
        for name in module.__all__:
            if name == "__version__":
                continue
            value = getattr(module, name)
            # Constants of equal value may be one object, and one object may have two names: compare
            # both.
            paths = found.setdefault((name, id(value)), [])
            own = f"{getattr(value, '__module__', '')}.{name}"
            if not paths and (own in elsewhere or own.startswith("zerotune.errors.")):
                paths.append(own)
            paths.append(f"{package}.{name}")
    return {paths[0]: paths[1:] for paths in (sorted(each, key=_rank) for each in found.values())}


def _rank(path: str) -> tuple[bool, bool, str]:
    """Sort key: first the module that defines an object, then the package that contains it."""
    package = path.rpartition(".")[0]
    home = getattr(_value(path), "__module__", "") or ""
    return package not in (home, *FACADES[1:]), not home.startswith(package), path


def write(folder: Path) -> None:
    """Write all pages into ``folder``; unchanged pages are not rewritten."""
    folder.mkdir(parents=True, exist_ok=True)
    written = dict(_pages())
    for name, text in written.items():
        page = folder / name
        if not page.exists() or page.read_text() != text:
            page.write_text(text)
    for page in folder.iterdir():
        if page.name not in written:
            page.unlink()


def _pages() -> Iterator[tuple[str, str]]:
    """Yield the file name and the text of each page."""
    pages = homes()
    of_package: dict[str, list[str]] = {name: [] for name in (*FACADES, *BELOW)}
    for package, names in BELOW.items():
        pages |= {path: pages.get(path, []) for path in (f"{package}.{name}" for name in names)}
    for path, aliases in pages.items():
        of_package[_package_of(path)].append(path)
        if _package_of(path) == "zerotune.errors":
            continue
        yield f"{path}.md", _page(path, aliases)
    for package, paths in of_package.items():
        own = {
            alias: path
            for path, names in pages.items()
            for alias in names
            if alias.rpartition(".")[0] == package
        }
        yield f"{package}.md", _package(package, sorted(paths, key=_last), own)
    yield f"{FRONT_ENDS}.md", _front_ends()
    yield "index.md", _index(tuple(of_package))


def _package_of(path: str) -> str:
    return max((one for one in (*BELOW, *FACADES) if path.startswith(f"{one}.")), key=len)


def _last(path: str) -> str:
    return path.rpartition(".")[2].lower()


def _value(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _directive(path: str) -> str:
    value = _value(path)
    if inspect.isclass(value):
        return "autoclass"
    return "autofunction" if inspect.isfunction(value) else "autodata"


def _made_in(package: str, name: str) -> str:
    """Return the module that defines a package's export, as the packages' stubs say."""
    stub = Path(importlib.import_module(package).__file__ or "").with_suffix(".pyi")
    for node in ast.parse(stub.read_text()).body if stub.exists() else ():
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return _made_in(node.module or "", name)
    return package


def _page(path: str, aliases: list[str]) -> str:
    kind = _directive(path)
    package = _package_of(path)
    # Orphans, since the theme would repeat a complete page tree on every page.
    lines = ["---", "orphan: true", "---", f"[{package}]({package}.md)", ""]
    # Protocols are not instantiated; autodoc would show a constructor with arbitrary arguments.
    signature = "()" if getattr(_value(path), "_is_protocol", False) else ""
    title = path.rpartition(".")[2]
    lines += [f"# {title}", "", "```{eval-rst}", f".. {kind}:: {path}{signature}"]
    if kind == "autodata":
        # A constant's docstring is below its definition, so document it in the defining module.
        package, _, name = path.rpartition(".")
        made = f"{_made_in(package, name)}.{name}"
        lines[-1] = f".. autodata:: {made}"
        aliases = [alias for alias in (path, *aliases) if alias != made]
    if kind == "autoclass":
        lines += ["   :members:", "   :inherited-members: Section, Exception, dict, tuple, Module"]
    # Aliases are ``py:data``: several entries for a class would make links to it ambiguous.
    for alias in aliases:
        lines += _same(alias)
    lines.append("```")
    if path in RELATED:
        lines += ["", "## Related", "", "Import these names from their modules.", ""]
        for module, names in RELATED[path].items():
            lines += [line for name in names.split() for line in _related(f"{module}.{name}")]
    return "\n".join([*lines, ""])


def _related(path: str) -> list[str]:
    kind = _directive(path)
    option = {"autoclass": ["   :members:"], "autodata": ["   :no-value:"]}.get(kind, [])
    return ["```{eval-rst}", f".. {kind}:: {path}", *option, "```", ""]


def _front_ends() -> str:
    lines = [
        "# For front ends",
        "",
        "A form, a command or a web page that shows plans needs more than a script does: readers",
        "that report every error at once, writers that keep the order of keys, and the sentences",
        "and data that `zerotune plan` and the builder show. The builder imports nothing else.",
        "Import each name from the module in its heading.",
        "",
    ]
    for module, names in FOR_FRONT_ENDS.items():
        lines += [f"## {module}", ""]
        lines += [line for name in names.split() for line in _related(f"{module}.{name}")]
    return "\n".join(lines)


def documented() -> set[str]:
    """Return all documented paths: of the defining modules and of the packages that export them."""
    paths = {path for home, aliases in homes().items() for path in (home, *aliases)}
    paths |= {f"{_made_in(path.rpartition('.')[0], _name(path))}.{_name(path)}" for path in paths}
    paths |= {f"{package}.{name}" for package, names in BELOW.items() for name in names}
    for table in (*RELATED.values(), FOR_FRONT_ENDS):
        paths |= {f"{module}.{name}" for module, names in table.items() for name in names.split()}
    return paths


def _name(path: str) -> str:
    return path.rpartition(".")[2]


def _same(alias: str) -> list[str]:
    return ["", f".. py:data:: {alias}", "", "   An alias."]


def _package(package: str, paths: list[str], aliases: dict[str, str]) -> str:
    module = importlib.import_module(package)
    head = [f"# {package}", "", (inspect.getdoc(module) or "").replace("``", "`"), ""]
    if package == "zerotune.errors":
        # Above the module's directive, inside which these paths would be relative to the module.
        lines = [line for path in paths for alias in homes()[path] for line in _same(alias)]
        lines = [*head[:2], "```{eval-rst}", *lines, "", ".. automodule:: zerotune.errors"]
        lines.append("   :members:")
        return "\n".join([*lines, "```", ""])
    rows = [(path.rpartition(".")[2], path) for path in paths]
    rows += [(alias.rpartition(".")[2], path) for alias, path in aliases.items()]
    rows.sort(key=lambda row: row[0].lower())
    table = [
        f"| [{name}]({path if _package_of(path) != 'zerotune.errors' else 'zerotune.errors'}.md)"
        f" | {_first_sentence(path)} |"
        for name, path in rows
    ]
    return "\n".join([*head, "| | |", "|---|---|", *table, ""])


def _first_sentence(path: str) -> str:
    value = _value(path)
    described = inspect.isclass(value) or inspect.isfunction(value)
    text = inspect.getdoc(value) or "" if described else _below(path)
    words = " ".join(text.split("\n\n")[0].split())
    return words.replace("``", "`").replace("|", "\\|")


def _below(path: str) -> str:
    """Return the docstring below a constant's definition."""
    from sphinx.pycode import ModuleAnalyzer

    package, _, name = path.rpartition(".")
    analyzer = ModuleAnalyzer.for_module(_made_in(package, name))
    return "\n".join(analyzer.find_attr_docs().get(("", name), []))


def _index(packages: tuple[str, ...]) -> str:
    def summary(package: str) -> str:
        text = inspect.getdoc(importlib.import_module(package)) or ""
        return text.split("\n\n")[0].replace("\n", " ").replace("``", "`")

    rows = [f"| [{package}]({package}.md) | {summary(package)} |" for package in packages]
    return "\n".join(
        [
            "# API",
            "",
            "The reference has a page for every public name, ordered by package. Most scripts need",
            "only names of `zerotune` itself. The page of a name also documents the types that the",
            "name returns, and related names that few scripts need, with their modules.",
            "",
            "| | |",
            "|---|---|",
            *rows,
            f"| [For front ends]({FRONT_ENDS}.md) | What forms and web pages for plans use. |",
            "",
            *("```{toctree}", ":hidden:", "", *packages, FRONT_ENDS, "```", ""),
        ]
    )


def undescribed(method: Any, docstring: str) -> list[str]:
    """Return the parameters of a function that ``docstring`` does not name."""
    named = {
        *re.findall(r"^ +\*{0,2}(\w+):", docstring, re.M),
        *re.findall(r"``\*{0,2}(\w+)``", docstring),
    }
    return [name for name in _parameters(method) if name not in named]


def with_arguments(owner: type, method: Any, docstring: str) -> str:
    """Complete a method's docstring by the arguments of the method that it overrides.

    A class that implements a protocol without inheriting from it is documented like the protocol,
    if the parameters have the same names.

    Args:
        owner: Class of the method.
        method: The function.
        docstring: The method's docstring.
    """
    if not undescribed(method, docstring):
        return docstring
    name, parameters = method.__name__, _parameters(method)
    overridden = [vars(base)[name] for base in owner.__mro__ if name in vars(base)]
    for each in (*overridden, _described().get((name, tuple(parameters)))):
        section = _arguments(inspect.getdoc(each) or "")
        if section and not undescribed(method, section):
            # Above the section that follows the arguments.
            behind = re.search(r"^(?:Returns|Raises|Yields):$", docstring, re.M)
            at = behind.start() if behind else len(docstring)
            return f"{docstring[:at].rstrip()}\n\n{section}\n\n{docstring[at:]}"
    return docstring


def methods(owner: type) -> Iterator[Any]:
    """Yield the functions of a class's own public methods."""
    for name, value in vars(owner).items():
        function = getattr(value, "__func__", value)
        if not name.startswith("_") and inspect.isfunction(function):
            yield function


def classes() -> list[type]:
    """Return every documented class."""
    values = (_value(path) for path in sorted(documented()) if _resolves(path))
    return list(dict.fromkeys(value for value in values if inspect.isclass(value)))


def owner_of(path: str) -> type:
    """Return the class at ``path``, a module's name and a class name."""
    owner: type = _value(path)
    return owner


def _resolves(path: str) -> bool:
    # Constants are documented in the module that the stub names, and not every stub names one.
    module, _, name = path.rpartition(".")
    return hasattr(importlib.import_module(module), name)


@cache
def _described() -> dict[tuple[str, tuple[str, ...]], Any]:
    """Return documented methods that describe all parameters, by name and parameters."""
    found: dict[tuple[str, tuple[str, ...]], Any] = {}
    for owner in (base for one in classes() for base in one.__mro__):
        for method in methods(owner):
            section = _arguments(inspect.getdoc(method) or "")
            if section and not undescribed(method, section):
                found.setdefault((method.__name__, tuple(_parameters(method))), method)
    return found


def _parameters(method: Any) -> list[str]:
    names = inspect.signature(method).parameters
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def _arguments(docstring: str) -> str:
    found = re.search(r"^Args:\n(?: .*\n?|\n(?= ))+", inspect.cleandoc(docstring) + "\n", re.M)
    return found[0].rstrip() if found else ""


def missing(listed: Container[str]) -> list[str]:
    """Return the public paths that are not among ``listed``, the names with an entry."""
    every = [path for home, aliases in homes().items() for path in (home, *aliases)]
    return sorted(path for path in every if path not in listed)


def _entries(inventory: Path) -> set[str]:
    from sphinx.util.inventory import InventoryFile

    with inventory.open("rb") as file:
        loaded = InventoryFile.load(file, "", lambda _uri, location: location)
    return {name for kind, names in loaded.items() if kind.startswith("py:") for name in names}


if __name__ == "__main__":
    left_out = missing(_entries(Path(sys.argv[1])))
    sys.exit(f"public names without an entry: {', '.join(left_out)}" if left_out else 0)
