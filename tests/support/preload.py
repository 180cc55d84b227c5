"""Imported once by the fork server: loads what most children need on this machine's accelerator."""

from __future__ import annotations

import contextlib
import functools
import gc

import torch
from _pytest.assertion import install_importhook
from _pytest.config import get_config

import tests.support.ranks  # noqa: F401

# Rewrites asserts, so that tests whose bodies run in children report the compared values.
install_importhook(get_config())

# With a GPU build of torch, the first CUDA call must come after the fork: probe and preload
# nothing.
on_cpu = torch.version.cuda is None and torch.version.hip is None

with contextlib.suppress(ImportError):
    from zerotune.backend.ops import build_op, op_report
    from zerotune.backend.step.kernel import host_step_status, load_host_step
    from zerotune.backend.upstream import quiet_deepspeed, require_deepspeed
    from zerotune.platform import detect_platform

    if on_cpu and detect_platform().deepspeed.available:
        require_deepspeed(accelerator="cpu")
        quiet_deepspeed()
        import deepspeed.ops

        # Every engine checks which ops can be compiled, which runs gcc twice.
        deepspeed.ops.__compatible_ops__  # noqa: B018
        # Every engine imports these.
        import deepspeed.module_inject.auto_ep_config
        import deepspeed.module_inject.auto_ep_layer
        import deepspeed.runtime.zero.muon.muon_optimizer

        # Every engine with offload loads these, after checking ninja and compilers.
        if all(op.state == "built" for op in op_report() if op.name == "cpu_adam"):
            build_op("cpu_adam")
        if host_step_status().state == "built":
            load_host_step()

if on_cpu:
    # A failure here recurs in the children that need the import, and is reported there.
    with contextlib.suppress(Exception):
        # diffusers imports a model on first access, and with it quantizers (which look for a GPU),
        # peft and transformers: four seconds in every child.
        import diffusers.training_utils  # noqa: F401
        from diffusers import UNet2DConditionModel, UNet2DModel  # noqa: F401
    with contextlib.suppress(Exception):
        import zerotune

        # Each public name imports its module on first access.
        for name in zerotune.__all__:
            getattr(zerotune, name)
        import zerotune.plan.read
        import zerotune.plan.resolution
    with contextlib.suppress(ImportError):
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401

with contextlib.suppress(ImportError):
    import sklearn.datasets

    # Tests load these data at every step, and the file is compressed text.
    sklearn.datasets.load_digits = functools.cache(sklearn.datasets.load_digits)
    sklearn.datasets.load_digits()

with contextlib.suppress(ImportError):
    import cpuinfo

    # DeepSpeed calls it several times per engine, and each call starts a process for a second.
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()

# Keep the garbage collector of the children from scanning everything loaded here.
gc.collect()
gc.freeze()
