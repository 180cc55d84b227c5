"""Copies beside the computation are right in every order, and a missing wait is seen."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from tests.device import on_device
from zerotune.diffusion import ActivationOffload
from zerotune.diffusion.activations import StreamTransfers

SEEDS = range(8)
WIDTH = 64


def late(seed):
    torch.simdev.seed_order(seed, 0.5 if seed % 2 else 0.02, 3000)


def gradients(transfers=None):
    """Return the gradients of a checkpointed model, in two steps."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(6)]
    model = torch.nn.ModuleList(layers).to("simdev")
    offload = None if transfers is None else ActivationOffload(smallest=1, transfers=transfers)
    found = []
    for step in range(2):
        x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(step))
        x = x.to("simdev").requires_grad_()
        torch.simdev.reset_counts()
        for layer in model:
            x = (
                checkpoint(layer, x, use_reentrant=False)
                if offload is None
                else offload.checkpoint(layer, x)
            )
        x.square().mean().backward()
        waits = torch.simdev.host_waits()
        found += [parameter.grad.cpu() for parameter in model.parameters()]
    return found, waits, offload


class NoWaitToStore(StreamTransfers):
    def store(self, tensor):
        computation, self._computation = self._computation, lambda: self._side
        try:
            return super().store(tensor)
        finally:
            self._computation = computation


class NoSettling(StreamTransfers):
    def settle(self, stored):
        pass

    def release(self, stored):
        self.pool.give(stored.buffer)


class NoWaitToLoad(StreamTransfers):
    def finish(self, loading):
        return loading.tensor


class ReusedAtOnce(StreamTransfers):
    """Reuses a block of host memory while its tensor is on its way."""

    def store(self, tensor):
        stored = super().store(tensor)
        stored.buffer.fill_(0)
        return stored


@on_device()
def test_offloaded_activations_give_the_same_gradients_without_a_wait_of_the_host():
    wanted, _, _ = gradients()
    for seed in SEEDS:
        late(seed)
        found, waits, offload = gradients(StreamTransfers(torch.device("simdev:0")))
        assert all(map(torch.equal, found, wanted)), seed
        assert waits == {}
        assert offload.counts.stored > 3
        assert offload.counts.fetched_ahead > 1


@on_device()
def test_activation_offload_without_one_of_its_waits_is_seen():
    wanted, _, _ = gradients()
    for kind in (NoWaitToStore, NoSettling, NoWaitToLoad, ReusedAtOnce):
        seen = 0
        for seed in SEEDS:
            late(seed)
            found, _, _ = gradients(kind(torch.device("simdev:0")))
            seen += not all(map(torch.equal, found, wanted))
        assert seen, kind
