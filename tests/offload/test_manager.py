from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.offload.plans import plain_plan, swapping_plan
from zerotune.errors import OffloadError, UnresolvedPlanError
from zerotune.offload import OffloadManager
from zerotune.offload.lease import find_leases
from zerotune.optim import OptimizerResolver
from zerotune.plan import DeepSpeedPlan
from zerotune.platform import Platform


class Wire:
    """Carries rank 0's string to the other ranks, which run later in the same process."""

    def __init__(self):
        self.text = None

    def __call__(self, text):
        self.text = self.text if self.text is not None else text
        return self.text


def decision(lease, key):
    (found,) = [one for one in lease.decisions if one.key == key]
    return found


def fill(folder):
    swap = folder / "zero_stage_3" / "bf16params" / "rank0"
    swap.mkdir(parents=True)
    (swap / "0_param.tensor.swp").write_bytes(b"x" * 8192)
    return swap


class TestWithoutNvme:
    def test_a_plan_without_swapping_creates_nothing(self, tmp_path):
        root, plan = tmp_path / "swap", plain_plan()
        with OffloadManager(root=root).lease(plan) as lease:
            assert lease.plan.digest() == plan.digest()
            assert lease.path is None
            assert not lease.paths
            assert list(tmp_path.iterdir()) == []
        assert list(tmp_path.iterdir()) == []

    def test_an_unused_root_is_recorded(self, tmp_path):
        with OffloadManager(root=tmp_path).lease(plain_plan()) as lease:
            assert decision(lease, "offload.root").before == str(tmp_path)
            assert decision(lease, "offload.root").after is None

    def test_several_ranks_without_swapping_need_no_share(self):
        with OffloadManager().lease(plain_plan(world_size=2), rank=1, world_size=2) as lease:
            assert [one.key for one in lease.decisions] == ["offload.host_memory"]


class TestOneRank:
    def test_the_plan_swaps_into_the_leased_folder(self, tmp_path):
        with OffloadManager(root=tmp_path).lease(swapping_plan(param="/given")) as lease:
            assert lease.path.parent == tmp_path
            assert lease.path.name == f"zerotune-{lease.run_id}"
            assert lease.plan.nvme_paths == {"param": str(lease.path), "optimizer": str(lease.path)}
            moved = decision(lease, "zero_optimization.offload_param.nvme_path")
            assert (moved.before, moved.after) == ("/given", str(lease.path))
            assert decision(lease, "zero_optimization.offload_optimizer.nvme_path").before is None

    def test_deepspeed_gets_the_path_of_the_leased_folder(self, tmp_path):
        plan = swapping_plan()
        with pytest.raises(UnresolvedPlanError, match="needs a folder"):
            plan.to_deepspeed()
        with OffloadManager(root=tmp_path).lease(plan) as lease:
            zero = lease.plan.to_deepspeed()["zero_optimization"]
            assert zero["offload_param"]["nvme_path"] == str(lease.path)
            assert zero["offload_optimizer"]["nvme_path"] == str(lease.path)
            assert lease.plan.digest() == plan.digest()

    def test_an_unresolved_plan_is_refused_before_anything_is_created(self, tmp_path):
        plan = DeepSpeedPlan.build(stage=3, offload="nvme", scheduler="WarmupDecayLR")
        plan = plan.resolve(platform=Platform.synthetic())
        with pytest.raises(UnresolvedPlanError, match=r"scheduler\.params\.total_num_steps"):
            OffloadManager(root=tmp_path / "swap").lease(plan).__enter__()
        assert list(tmp_path.iterdir()) == []

    def test_only_swapped_parts_get_a_path(self, tmp_path):
        plan = swapping_plan(swap_param=False)
        with OffloadManager(root=tmp_path).lease(plan) as lease:
            assert lease.plan.nvme_paths == {"optimizer": str(lease.path)}
            assert set(lease.paths) == {"optimizer"}

    def test_the_folder_is_private_and_names_its_owner(self, tmp_path):
        plan = swapping_plan()
        with OffloadManager(root=tmp_path).lease(plan) as lease:
            assert stat.S_IMODE(lease.path.stat().st_mode) == 0o700
            record = json.loads((lease.path / "rank0.json").read_text())
            assert record["owner"]["pid"] == os.getpid()
            assert record["run_id"] == lease.run_id
            assert (record["rank"], record["world_size"]) == (0, 1)
            assert record["plan_digest"] == plan.digest()

    def test_two_leases_of_one_process_have_separate_folders(self, tmp_path):
        manager = OffloadManager(root=tmp_path)
        with manager.lease(swapping_plan()) as outer:
            with manager.lease(swapping_plan()) as inner:
                assert inner.path != outer.path
                fill(outer.path)
            assert not inner.path.exists()
            assert (outer.path / "zero_stage_3").exists()
            assert [one.state for one in find_leases(tmp_path)] == ["live"]


class TestChoiceOfRoot:
    def lease_parent(self, manager, **plan):
        with manager.lease(swapping_plan(**plan)) as lease:
            return lease.path.parent, lease

    def test_the_argument_overrides_the_plan_and_the_plan_the_environment(
        self, tmp_path, monkeypatch
    ):
        roots = {name: tmp_path / name for name in ("argument", "plan", "environment")}
        monkeypatch.setenv("ZEROTUNE_SWAP_ROOT", str(roots["environment"]))
        argument = OffloadManager(root=roots["argument"])
        assert self.lease_parent(argument, param=roots["plan"])[0] == roots["argument"]
        assert self.lease_parent(OffloadManager(), param=roots["plan"])[0] == roots["plan"]
        parent, lease = self.lease_parent(OffloadManager())
        assert parent == roots["environment"]
        assert "ZEROTUNE_SWAP_ROOT" in decision(lease, "offload.root").reason

    @pytest.mark.parametrize("key", ["offload_param_path", "--offload_param_path"])
    def test_a_trainers_file_overrides_deepspeeds_path_and_the_environment(
        self, tmp_path, monkeypatch, key
    ):
        monkeypatch.setenv("ZEROTUNE_OFFLOAD_PARAM_PATH", str(tmp_path / "environment"))
        config = swapping_plan(param=tmp_path / "plan").requested.to_deepspeed()
        trainer = {key: str(tmp_path / "trainer"), "deepspeed_config": config}
        plan = DeepSpeedPlan.from_dict(trainer).resolve(platform=Platform.synthetic())
        plan = OptimizerResolver().resolve(plan)
        with OffloadManager().lease(plan) as lease:
            assert lease.path.parent == tmp_path / "trainer"
            reason = next(one.reason for one in lease.decisions if one.key == "offload.root")
        assert "taken from offload_param_path, which overrides" in reason
        assert f"nvme_path = {tmp_path / 'plan'}" in reason
        assert f"ZEROTUNE_OFFLOAD_PARAM_PATH = {tmp_path / 'environment'}" in reason
        with OffloadManager(offload_param_path=tmp_path / "argument").lease(plan) as lease:
            assert lease.path.parent == tmp_path / "argument"

    def test_each_part_has_its_own_environment_variable(self, tmp_path, monkeypatch):
        for name in ("OFFLOAD_PARAM_PATH", "OFFLOAD_OPTIMIZER_PATH", "SWAP_ROOT"):
            monkeypatch.setenv(f"ZEROTUNE_{name}", str(tmp_path / name))
        with OffloadManager().lease(swapping_plan()) as lease:
            assert lease.paths["param"].parent == tmp_path / "OFFLOAD_PARAM_PATH"
            assert lease.paths["optimizer"].parent == tmp_path / "OFFLOAD_OPTIMIZER_PATH"
        monkeypatch.delenv("ZEROTUNE_OFFLOAD_OPTIMIZER_PATH")
        with OffloadManager().lease(swapping_plan()) as lease:
            assert lease.paths["optimizer"].parent == tmp_path / "SWAP_ROOT"
        monkeypatch.delenv("ZEROTUNE_SWAP_ROOT")
        with OffloadManager().lease(swapping_plan()) as lease:
            assert lease.paths["optimizer"].parent == tmp_path / "OFFLOAD_PARAM_PATH"

    def test_a_launchers_none_is_not_a_path(self, tmp_path, monkeypatch):
        monkeypatch.setenv("ZEROTUNE_SWAP_ROOT", str(tmp_path))
        assert self.lease_parent(OffloadManager(), param="none", optimizer=" ")[0] == tmp_path

    def test_using_the_temporary_folder_gives_a_warning(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        parent, lease = self.lease_parent(OffloadManager())
        assert parent.parent == tmp_path
        assert stat.S_IMODE(parent.stat().st_mode) == 0o700
        assert decision(lease, "offload.root").severity == "warning"

    def test_the_optimizer_may_have_another_root(self, tmp_path):
        roots = tmp_path / "a", tmp_path / "b"
        manager = OffloadManager(root=roots[0], offload_optimizer_path=roots[1])
        with manager.lease(swapping_plan()) as lease:
            assert lease.path == lease.paths["param"]
            assert [lease.paths[key].parent for key in ("param", "optimizer")] == list(roots)
            assert lease.plan.nvme_paths["optimizer"] == str(lease.paths["optimizer"])
        assert [list(root.iterdir()) for root in roots] == [[], []]

    def test_one_root_given_twice_gives_one_folder(self, tmp_path):
        manager = OffloadManager(root=tmp_path, offload_optimizer_path=tmp_path / "a" / "..")
        (tmp_path / "a").mkdir()
        with manager.lease(swapping_plan()) as lease:
            assert lease.paths["param"] == lease.paths["optimizer"]

    def test_an_invalid_second_root_leaves_nothing_in_the_first(self, tmp_path):
        (tmp_path / "file").touch()
        manager = OffloadManager(root=tmp_path / "a", offload_optimizer_path=tmp_path / "file")
        with pytest.raises(OffloadError, match=r"OffloadManager.offload_optimizer_path = .*file"):
            self.lease_parent(manager)
        assert list((tmp_path / "a").iterdir()) == []

    @pytest.mark.parametrize("name", ["root", "offload_param_path", "offload_optimizer_path"])
    def test_a_blank_argument_is_refused(self, name):
        with pytest.raises(OffloadError, match=r"OffloadManager\.root = ' ': is blank"):
            OffloadManager(**{name: " "})


class TestFailures:
    def test_an_exception_propagates_and_the_folder_is_removed(self, tmp_path):
        with (  # noqa: PT012
            pytest.raises(KeyError, match="boom"),
            OffloadManager(root=tmp_path).lease(swapping_plan()) as lease,
        ):
            fill(lease.path)
            raise KeyError("boom")
        assert list(tmp_path.iterdir()) == []

    @staticmethod
    def replace_with_link(lease, tmp_path):
        lease.path.rename(tmp_path / "moved")
        (tmp_path / "precious").mkdir()
        (tmp_path / "precious" / "file").write_text("keep")
        lease.path.symlink_to(tmp_path / "precious")

    def test_a_failed_clean_up_does_not_mask_the_exception(self, tmp_path, caplog):
        root = tmp_path / "root"
        with (  # noqa: PT012
            pytest.raises(KeyError, match="boom"),
            OffloadManager(root=root).lease(swapping_plan()) as lease,
        ):
            self.replace_with_link(lease, tmp_path)
            raise KeyError("boom")
        assert decision(lease, "offload.release").severity == "warning"
        assert "cannot be removed" in caplog.text
        assert (tmp_path / "precious" / "file").read_text() == "keep"

    def test_a_different_folder_at_the_same_path_is_not_touched(self, tmp_path):
        with (  # noqa: PT012
            pytest.raises(OffloadError, match="no longer the folder that this run created"),
            OffloadManager(root=tmp_path / "root").lease(swapping_plan()) as lease,
        ):
            lease.path.rename(tmp_path / "moved")
            fill(lease.path)
        assert (lease.path / "zero_stage_3").exists()

    def test_a_folder_deleted_during_the_run_is_reported(self, tmp_path):
        with OffloadManager(root=tmp_path / "root").lease(swapping_plan()) as lease:
            subprocess.run(["rm", "-r", str(tmp_path / "root")], check=True)
        assert "was deleted during the run" in decision(lease, "offload.release").reason

    def test_a_full_disk_while_leasing_leaves_nothing(self, tmp_path, monkeypatch):
        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("zerotune.offload.lease.os.fsync", full)
        with pytest.raises(OffloadError, match="No space left"):
            OffloadManager(root=tmp_path).lease(swapping_plan()).__enter__()
        assert list(tmp_path.iterdir()) == []


class TestRanks:
    def lease(self, root, wire, rank, **extra):
        manager = OffloadManager(root=root, share=wire)
        plan = extra.pop("plan", None) or swapping_plan(world_size=2)
        return manager.lease(plan, rank=rank, world_size=2, **extra)

    def test_ranks_share_one_folder(self, tmp_path):
        wire = Wire()
        with self.lease(tmp_path, wire, 0) as first, self.lease(tmp_path, wire, 1) as second:
            assert first.path == second.path
            assert {file.name for file in first.path.iterdir()} == {
                "lease.lock",
                "rank0.json",
                "rank1.json",
            }
            assert not [one for one in second.decisions if one.key == "offload.stale_swap"]

    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    def test_without_a_barrier_the_last_rank_removes_the_folder(self, tmp_path, order):
        wire = Wire()
        leases = [self.lease(tmp_path, wire, rank) for rank in (0, 1)]
        path, _ = [lease.__enter__().path for lease in leases]
        leases[order[0]].__exit__(None, None, None)
        assert path.exists()
        assert [one.state for one in find_leases(tmp_path)] == ["live"]
        leases[order[1]].__exit__(None, None, None)
        assert not path.exists()

    def test_with_a_barrier_its_creator_removes_the_folder(self, tmp_path):
        wire, calls = Wire(), []
        with ExitStack() as stack:
            first = stack.enter_context(
                self.lease(tmp_path, wire, 0, barrier=lambda: calls.append(0))
            )
            with self.lease(tmp_path, wire, 1, barrier=lambda: calls.append(1)):
                pass
            assert first.path.exists()
        assert not first.path.exists()
        assert calls == [1, 0]

    def test_a_rank_that_skips_the_barrier_is_recorded(self, tmp_path):
        wire = Wire()
        first = self.lease(tmp_path, wire, 0, barrier=lambda: None)
        second = self.lease(tmp_path, wire, 1, barrier=lambda: None)
        lease = first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert "still locks the folder" in decision(lease, "offload.release").reason
        assert lease.path.exists()
        second.__exit__(None, None, None)

    def test_a_failing_barrier_raises_and_nothing_is_left(self, tmp_path):
        def broken():
            raise ConnectionError("rank 1 is gone")

        with (
            pytest.raises(ConnectionError, match="rank 1 is gone"),
            self.lease(tmp_path, Wire(), 0, barrier=broken),
        ):
            pass
        assert list(tmp_path.iterdir()) == []

    def test_no_barrier_is_called_after_an_exception(self, tmp_path):
        def hang():
            pytest.fail("the other rank may never reach a barrier")

        with pytest.raises(KeyError), self.lease(tmp_path, Wire(), 0, barrier=hang):
            raise KeyError

    def test_ranks_with_separate_disks_have_a_folder_each(self, tmp_path):
        wire = Wire()
        roots = tmp_path / "node0", tmp_path / "node1"
        with self.lease(roots[0], wire, 0) as first, self.lease(roots[1], wire, 1) as second:
            assert first.run_id == second.run_id
            assert [first.path.parent, second.path.parent] == list(roots)
        assert [list(root.iterdir()) for root in roots] == [[], []]

    def test_a_failure_of_rank_0_reaches_every_rank(self, tmp_path):
        wire = Wire()
        (tmp_path / "file").touch()
        for rank in (0, 1):
            with pytest.raises(OffloadError, match="is a file, not a folder"):
                self.lease(tmp_path / "file", wire, rank).__enter__()

    def test_a_different_plan_on_another_rank_is_refused(self, tmp_path):
        wire = Wire()
        with self.lease(tmp_path, wire, 0) as first:
            other = self.lease(tmp_path, wire, 1, plan=swapping_plan(lr=3e-4, world_size=2))
            with pytest.raises(
                OffloadError, match="rank 1 has a different plan from rank 0"
            ) as caught:
                other.__enter__()
            assert first.path.exists()
            (record,) = tmp_path.glob("*/rank0.json")
            assert (caught.value.key, caught.value.value) == ("lease record", str(record))
            plans = [swapping_plan(lr=lr, world_size=2) for lr in (3e-4, 1e-4)]
            digests = [plan.digest()[:12] for plan in plans]
            assert f"this record: {digests[0]} instead of {digests[1]}" in caught.value.reason

    @pytest.mark.parametrize("rank", [0, 1])
    def test_several_ranks_require_a_share_function(self, tmp_path, rank):
        with pytest.raises(OffloadError, match=r"OffloadManager\.share"):
            self.lease(tmp_path, None, rank).__enter__()
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("ranks", "says"),
        [
            ({"world_size": 1}, "resolved for 2 ranks"),
            ({"rank": 2}, "is not a rank of a run with 2"),
            ({"rank": -1}, "is not a rank of a run with 2"),
        ],
    )
    def test_the_world_size_must_be_the_plans(self, tmp_path, ranks, says):
        manager = OffloadManager(root=tmp_path, share=Wire())
        with pytest.raises(OffloadError, match=says):
            manager.lease(swapping_plan(world_size=2), **ranks).__enter__()
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("answer", ["", "../../etc", "20250101T000000-0123456789ab/.."])
    def test_a_shared_string_cannot_point_outside_the_root(self, tmp_path, answer):
        with pytest.raises(OffloadError, match="is not a run id"):
            self.lease(tmp_path, lambda _: answer, 1).__enter__()
        assert list(tmp_path.iterdir()) == []


class TestPlatforms:
    def test_without_file_locks_nothing_is_created(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "fcntl", None)
        root = tmp_path / "swap"
        with pytest.raises(OffloadError, match=r"lacks flock.*cpu instead of nvme"):
            OffloadManager(root=root).lease(swapping_plan()).__enter__()
        assert not root.exists()
        with OffloadManager(root=root).lease(plain_plan()) as lease:
            assert lease.path is None

    def test_the_module_imports_without_fcntl_torch_and_deepspeed(self):
        source = str(Path(sys.modules["zerotune.offload"].__file__).parents[2])
        blocked = "import sys; sys.modules.update(dict.fromkeys(('fcntl', 'torch', 'deepspeed')))"
        subprocess.run(
            [sys.executable, "-c", f"{blocked}; import zerotune.offload"],
            check=True,
            env={**os.environ, "PYTHONPATH": source},
        )

    def test_a_file_system_without_locks_is_refused(self, tmp_path, monkeypatch):
        def unsupported(*_):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(fcntl, "flock", unsupported)
        with pytest.raises(OffloadError, match="does not support file locks"):
            OffloadManager(root=tmp_path).lease(swapping_plan()).__enter__()
        assert list(tmp_path.iterdir()) == []
