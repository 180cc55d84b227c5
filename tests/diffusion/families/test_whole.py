"""VAE and text encoders stay unpartitioned while stage 3 partitions everything else."""

from __future__ import annotations

import pytest
import torch

from tests.diffusion.families.loading import answers, under_stage_3
from tests.support.ranks import run_ranks
from zerotune.backend.upstream import check_whole, unpartitioned
from zerotune.diffusion import load_pretrained
from zerotune.errors import EngineError


@pytest.fixture(scope="module")
def expected(folders):
    """Return the outputs of VAE and text encoders without partitioning."""
    names = ("sdxl", "flux")
    return {n: answers(load_pretrained(folders[n], frozen_dtype="fp32").family) for n in names}


@pytest.mark.deepspeed
def test_frozen_parts_are_unpartitioned_and_correct(folders, expected):
    paths = {name: str(folders[name]) for name in expected}
    for found in run_ranks(under_stage_3, paths, expected, world_size=2):
        # Without ``unpartitioned`` the parts are partitioned and cannot be used.
        assert "no error" not in found["naive"]["forward"]
        assert "EngineError: text_encoder.embeddings" in found["naive"]["check"].replace(
            "text_model.", ""
        )
        assert found["same"] == {"sdxl": True, "flux": True}
        assert found["parts"] == {
            "sdxl": ["text_encoder", "text_encoder_2", "vae"],
            "flux": ["text_encoder", "text_encoder_2", "vae"],
        }
        assert found["nested"] == (3, 3)
        # Leaving ``unpartitioned`` restores the previous state.
        assert found["registered"]
        assert found["made_after"]
        assert not found["outside"]
        assert found["unknown_inside"]
        assert found["known_after"]
        assert found["after_an_error"]


def test_a_partitioned_part_is_refused_by_name():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    check_whole(module, name="vae")
    with unpartitioned():
        check_whole(torch.nn.Linear(2, 2), name="vae")
    # Stage 3 leaves a partitioned parameter in this state.
    module[1].weight.data = torch.empty(0)
    with pytest.raises(EngineError, match=r"vae\.1\.weight = \(0,\).*unpartitioned"):
        check_whole(module, name="vae")
