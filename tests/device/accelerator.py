"""The device as DeepSpeed's accelerator."""

# ruff: noqa: ARG002 - the interface is DeepSpeed's

from __future__ import annotations

from functools import partial

import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.ops.op_builder.cpu import FusedAdamBuilder as CPUFusedAdamBuilder

from tests.device import simdev


class SimulatedAccelerator(CPU_Accelerator):
    """Streams, memory and generators of the device, with DeepSpeed's ops for the CPU."""

    _torch_pins_host_memory = True

    def __init__(self):
        super().__init__()
        # Plans know CUDA, and expect DeepSpeed to run on what they were made for.
        self._name = "cuda"
        self._communication_backend_name = "simccl"
        self._compile_backend = "eager"

    # The CPU's accelerator is synchronous; this one is not.
    def is_synchronized_device(self):
        return False

    # -- The device.

    def device_name(self, device_index=None):
        return "simdev" if device_index is None else f"simdev:{device_index}"

    def device(self, device_index=None):
        return simdev.device(device_index)

    def current_device(self):
        return 0

    def current_device_name(self):
        return "simdev:0"

    def device_count(self):
        return 1

    def synchronize(self, device_index=None):
        simdev.synchronize()

    def on_accelerator(self, tensor):
        return tensor.device.type == "simdev"

    @property
    def BFloat16Tensor(self):
        return partial(torch.tensor, dtype=torch.bfloat16, device="simdev")

    @property
    def ByteTensor(self):
        return partial(torch.tensor, dtype=torch.uint8, device="simdev")

    @property
    def DoubleTensor(self):
        return partial(torch.tensor, dtype=torch.float64, device="simdev")

    @property
    def FloatTensor(self):
        return partial(torch.tensor, dtype=torch.float32, device="simdev")

    @property
    def HalfTensor(self):
        return partial(torch.tensor, dtype=torch.float16, device="simdev")

    @property
    def IntTensor(self):
        return partial(torch.tensor, dtype=torch.int32, device="simdev")

    @property
    def LongTensor(self):
        return partial(torch.tensor, dtype=torch.int64, device="simdev")

    # -- Random numbers.

    def random(self):
        return torch.random

    def set_rng_state(self, new_state, device_index=None):
        simdev.set_rng_state(new_state)

    def get_rng_state(self, device_index=None):
        return simdev.get_rng_state()

    def manual_seed(self, seed):
        simdev.manual_seed(seed)

    def manual_seed_all(self, seed):
        simdev.manual_seed_all(seed)

    def initial_seed(self):
        return simdev.initial_seed()

    def default_generator(self, device_index):
        return simdev.default_generators[0]

    # -- Streams and events.

    @property
    def Stream(self):
        return simdev.Stream

    @property
    def Event(self):
        return simdev.Event

    def stream(self, stream):
        return simdev.stream(stream)

    def current_stream(self, device_index=None):
        return simdev.current_stream()

    def default_stream(self, device_index=None):
        return simdev.default_stream()

    # -- Memory.

    def memory_allocated(self, device_index=None):
        return simdev.memory_allocated()

    def max_memory_allocated(self, device_index=None):
        return simdev.max_memory_allocated()

    def memory_reserved(self, device_index=None):
        return simdev.memory_reserved()

    def max_memory_reserved(self, device_index=None):
        return simdev.max_memory_reserved()

    def memory_stats(self, device_index=None):
        return simdev.memory_stats()

    def reset_peak_memory_stats(self, device_index=None):
        simdev.reset_peak_memory_stats()

    def total_memory(self, device_index=None):
        return simdev.mem_get_info()[1]

    def available_memory(self, device_index=None):
        return simdev.mem_get_info()[0]

    memory_cached = memory_reserved
    max_memory_cached = max_memory_reserved
    reset_max_memory_allocated = reset_peak_memory_stats
    reset_max_memory_cached = reset_peak_memory_stats

    def pin_memory(self, tensor, make_copy=True, match_shape=True):
        return super(CPU_Accelerator, self).pin_memory(tensor, make_copy, match_shape)

    def _torch_pin_memory(self, tensor):
        return tensor.pin_memory()

    def _torch_empty_pinned(self, tensor, shape):
        return torch.empty(shape, dtype=tensor.dtype, pin_memory=True)

    def register_host_memory(self, address, num_bytes):
        simdev.pin(address, num_bytes)

    def unregister_host_memory(self, address):
        simdev.unpin(address)

    def get_op_builder(self, class_name):
        own = class_name == "FusedAdamBuilder"
        return FusedAdamBuilder if own else super().get_op_builder(class_name)


class FusedAdamBuilder(CPUFusedAdamBuilder):
    """DeepSpeed's fused Adam, of the device's operators: the CPU's op reads device memory."""

    def load(self, verbose=True):
        return self

    def multi_tensor_adam(
        self, _chunk, _overflow, lists, lr, beta1, beta2, eps, step, decoupled, corrects, decay
    ):
        """Update parameters and moments, as ``csrc/adam/multi_tensor_adam.cu`` does."""
        first, second = (1 - beta1**step, 1 - beta2**step) if corrects else (1.0, 1.0)
        for gradient, weight, mean, square in zip(*lists, strict=True):
            value, slope = weight.float(), gradient.float()
            slope = slope if decoupled else slope + decay * value
            mean.copy_(beta1 * mean + (1 - beta1) * slope)
            square.copy_(beta2 * square + (1 - beta2) * slope * slope)
            update = (mean / first) / ((square / second).sqrt() + eps)
            weight.copy_(value - lr * (update + decay * value if decoupled else update))
