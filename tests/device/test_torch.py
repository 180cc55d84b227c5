"""Parts of torch that a device takes part in: autocast, compiled and recomputed code."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.device import on_device


def attention(inputs):
    return torch.nn.functional.scaled_dot_product_attention(inputs, inputs, inputs).sin()


@on_device()
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_computes_the_same_bits(backend):
    gradients = []
    for function in (attention, torch.compile(attention, backend=backend, fullgraph=True)):
        torch.manual_seed(0)
        there = torch.randn(1, 2, 8, 16, device="simdev", requires_grad=True)
        function(there).sum().backward()
        gradients.append(there.grad.cpu())
    assert torch.equal(*gradients)


@on_device()
def test_attention_keeps_no_scores_and_computes_the_cpus_bits():
    shape, simdev = (1, 2, 256, 16), torch.simdev
    here = torch.randn(shape, requires_grad=True)
    there = here.detach().to("simdev").requires_grad_()
    before = simdev.memory_allocated()
    simdev.reset_peak_memory_stats()
    attention(there).sum().backward()
    assert simdev.max_memory_allocated() - before < 2 * 256 * 256 * 4
    attention(here).sum().backward()
    assert torch.equal(there.grad.cpu(), here.grad)


@on_device(lateness=0.0)
def test_work_that_runs_while_code_is_traced_is_not_part_of_the_trace():
    there = torch.ones(4).pin_memory().to("simdev", non_blocking=True)
    doubled = there * 2
    with FakeTensorMode():
        torch.simdev.synchronize()
    assert doubled.tolist() == [2] * 4
