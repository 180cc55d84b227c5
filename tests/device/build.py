"""Compile the device, once per machine, into torch's folder of extensions."""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import torch

from zerotune._util.files import write_atomically
from zerotune.backend.op_builds import build_folder, building, built_library
from zerotune.backend.op_causes import naming_the_cause
from zerotune.backend.ops import missing_compiler
from zerotune.platform.toolchain import detect_compilers

_SOURCES = Path(__file__).with_name("csrc")
# Half of torch's headers warn, and nobody debugs what they inline.
_FLAGS = ("-O1", "-g0", "-w")


def why_missing() -> str | None:
    """Return why the device cannot be built here; ``None`` if it can."""
    found = missing_compiler(detect_compilers())
    return None if found is None else f"the simulated device needs a compiler: {found.cause}"


@cache
def load_device() -> ModuleType:
    """Compile the device unless that has been done, and load it into this process."""
    path = _compiled()
    loader = ExtensionFileLoader("simdev", str(path))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


def _compiled() -> Path:
    from torch.utils import cpp_extension

    files = sorted(_SOURCES.iterdir())
    # The name has a digest, so that the library is never that of other sources.
    digest = hashlib.sha256(f"{torch.__version__} {sys.version} {_FLAGS}".encode())
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    name = f"zerotune_simdev_{digest.hexdigest()[:12]}"
    folder = build_folder(name)
    library = built_library(folder)
    # Asking ninja whether there is work takes as long as importing torch.
    if library is not None and not (folder / "lock").exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    # All files as one: torch's headers take much longer than the sources, and are read once.
    content = "".join(f'#include "{file}"\n' for file in files if file.suffix == ".cpp")
    write_atomically(folder / "device.cpp", content.encode())
    with building(), naming_the_cause(name):
        cpp_extension.load(
            name=name,
            sources=[str(folder / "device.cpp")],
            extra_cflags=list(_FLAGS),
            build_directory=str(folder),
            is_python_module=False,
        )
    return folder / f"{name}.so"
