"""Plans for the tests of the swap lease; imported by tests and by the processes they start."""

from __future__ import annotations

import hashlib

import attrs


@attrs.frozen(kw_only=True)
class StandIn:
    offload_param: str
    offload_optimizer: str
    nvme_paths: dict
    salt: str = ""

    def digest(self):
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def with_nvme_path(self, *, param=None, optimizer=None):
        given = {"param": param, "optimizer": optimizer}
        return attrs.evolve(
            self, nvme_paths={**self.nvme_paths, **{k: v for k, v in given.items() if v}}
        )


def swapping_plan(*, param=None, optimizer=None, swap_param=True, swap_optimizer=True, lr=1e-4):
    paths = {"param": param, "optimizer": optimizer}
    return StandIn(
        offload_param="nvme" if swap_param else "none",
        offload_optimizer="nvme" if swap_optimizer else "cpu",
        nvme_paths={key: str(value) for key, value in paths.items() if value},
        salt=str(lr),
    )


def plain_plan():
    return swapping_plan(swap_param=False, swap_optimizer=False)
