"""Imported once by the fork server: what most children need, on this machine's accelerator."""

from __future__ import annotations

import contextlib
import functools
import gc

import torch
from _pytest.assertion import install_importhook
from _pytest.config import get_config

import tests.support.ranks  # noqa: F401

# So that asserts of tests whose body runs in a child say what they compared.
install_importhook(get_config())

# Where torch was built for GPUs the first call of CUDA must come after the fork: nothing is probed
# or preloaded here.
on_cpu = torch.version.cuda is None and torch.version.hip is None

with contextlib.suppress(ImportError):
    from zerotune.backend.deepspeed.start import digests
    from zerotune.backend.ops import build_op, op_report
    from zerotune.backend.step.kernel import host_step_status, load_host_step
    from zerotune.backend.upstream import quiet_deepspeed, require_deepspeed
    from zerotune.platform import detect_platform

    if on_cpu and detect_platform().deepspeed.available:
        require_deepspeed(accelerator="cpu")
        quiet_deepspeed()
        import deepspeed.ops

        # Each engine asks once what can be compiled, and the answer takes two runs of gcc.
        deepspeed.ops.__compatible_ops__  # noqa: B018
        # Each engine imports these, whatever it is to do.
        import deepspeed.module_inject.auto_ep_config
        import deepspeed.module_inject.auto_ep_layer
        import deepspeed.runtime.zero.muon.muon_optimizer

        # Each engine compares them with those it knows.
        digests()
        # Each engine that offloads loads these, and asks ninja and compilers first.
        if all(op.state == "built" for op in op_report() if op.name == "cpu_adam"):
            build_op("cpu_adam")
        if host_step_status().state == "built":
            load_host_step()

if on_cpu:
    # What fails here fails again in the children that need it, where it is seen.
    with contextlib.suppress(Exception):
        # diffusers loads a model when it is first asked for one, and with it quantizers (which
        # look for a GPU), peft and transformers: four seconds in every child.
        import diffusers.training_utils  # noqa: F401
        from diffusers import UNet2DConditionModel, UNet2DModel  # noqa: F401
    with contextlib.suppress(Exception):
        import zerotune

        # Each public name loads its module when it is first asked for.
        for name in zerotune.__all__:
            getattr(zerotune, name)
        import zerotune.plan.read
        import zerotune.plan.resolve
        import zerotune.plan.rules
    with contextlib.suppress(ImportError):
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401

with contextlib.suppress(ImportError):
    import sklearn.datasets

    # The tests take a batch of them at every step; the file is compressed text.
    sklearn.datasets.load_digits = functools.cache(sklearn.datasets.load_digits)
    sklearn.datasets.load_digits()

with contextlib.suppress(ImportError):
    import cpuinfo

    # DeepSpeed asks several times per engine, and each answer starts a process for a second.
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()

# What is loaded here lasts: children need not look at it whenever they, or DeepSpeed, collect.
gc.collect()
gc.freeze()
