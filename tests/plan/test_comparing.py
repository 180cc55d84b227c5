from __future__ import annotations

import json

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune.errors import InvalidValueError
from zerotune.plan import DeepSpeedPlan
from zerotune.plan.diff import Change
from zerotune.plan.optimizer.choices import GroupChoice, OptimizerChoice, SchedulerChoice
from zerotune.platform import Platform

ADAMW = OptimizerChoice(name="AdamW", params={"lr": 1e-4}, implementation="DeepSpeedCPUAdam")
WARMUP = SchedulerChoice(name="WarmupLR", params={"warmup_num_steps": 10})


def changes(difference):
    return {change.key: (change.kind, change.before, change.after) for change in difference.changes}


class TestPlans:
    def test_equal_plans_have_no_difference(self, reference_a):
        difference = DeepSpeedPlan.from_dict(reference_a).diff(DeepSpeedPlan.from_dict(reference_a))

        assert not difference
        assert difference.explain() == "dict -> dict: no difference"
        assert difference.to_dict() == {"before": "dict", "after": "dict", "changes": []}

    def test_every_kind_of_change_is_listed(self, reference_a):
        before = DeepSpeedPlan.from_dict(reference_a, source="a.json")
        del reference_a["scheduler"], reference_a["gradient_clipping"]
        reference_a["zero_optimization"]["stage"] = 3
        reference_a["optimizer"]["params"]["betas"] = [0.9, 0.99]
        reference_a["bf16"] = {"enabled": True}
        difference = before.diff(DeepSpeedPlan.from_dict(reference_a, source="b.json"))

        assert changes(difference) == {
            "gradient_clipping": ("removed", 1.0, None),
            "zero_optimization.stage": ("changed", 2, 3),
            "optimizer.params.betas": ("changed", [0.9, 0.999], [0.9, 0.99]),
            "scheduler.type": ("removed", "WarmupLR", None),
            "scheduler.params.warmup_min_lr": ("removed", 0, None),
            "scheduler.params.warmup_max_lr": ("removed", 1e-4, None),
            "scheduler.params.warmup_num_steps": ("removed", 500, None),
            "bf16.enabled": ("added", None, True),
        }
        lines = difference.explain().splitlines()
        assert lines[0] == "a.json -> b.json: 8 differences"
        assert "  ~ zero_optimization.stage: 2 -> 3" in lines
        assert "  + bf16.enabled: true" in lines
        assert '  - scheduler.type: "WarmupLR"' in lines
        data = difference.to_dict()
        assert json.loads(json.dumps(data)) == data
        assert {"key": "bf16.enabled", "kind": "added", "after": True} in data["changes"]

    def test_an_empty_section_differs_from_a_missing_one(self):
        nothing = DeepSpeedPlan.from_dict({})
        empty = DeepSpeedPlan.from_dict({"flops_profiler": {}})
        full = DeepSpeedPlan.from_dict({"flops_profiler": {"enabled": True}})

        assert nothing.diff(empty).changes == (
            Change(key="flops_profiler", kind="added", after={}),
        )
        assert empty.diff(full).changes == (
            Change(key="flops_profiler.enabled", kind="added", after=True),
        )
        assert nothing.diff(empty).explain().startswith("dict -> dict: 1 difference\n")

    def test_launcher_settings_are_compared(self, tmp_path, reference_c):
        path = tmp_path / "a.yaml"
        path.write_text(reference_c)
        before = DeepSpeedPlan.from_yaml(path)
        path.write_text(reference_c.replace("mixed_precision: bf16", "mixed_precision: fp16"))

        assert changes(before.diff(DeepSpeedPlan.from_yaml(path)))[
            "launch.mixed_precision"
        ] == ("changed", "bf16", "fp16")  # fmt: skip

    def test_long_values_are_truncated_in_text_only(self):
        long = list(range(100))
        difference = DeepSpeedPlan.from_dict({}).diff(
            DeepSpeedPlan.from_dict({"data_types": {"a": long}}, also_known=["data_types.a"])
        )

        assert max(map(len, difference.explain().splitlines())) < 130
        assert difference.to_dict()["changes"][0]["after"] == long

    def test_the_source_of_a_plan_is_not_compared(self, reference_a):
        plan = DeepSpeedPlan.from_dict(reference_a)
        assert not plan.diff(attrs.evolve(plan, source="elsewhere", decisions=()))

    @given(
        st.lists(
            st.builds(
                lambda stage, clip, extra: {
                    "zero_optimization": {"stage": stage},
                    **({} if clip is None else {"gradient_clipping": clip}),
                    **({} if extra is None else {"flops_profiler": extra}),
                },
                st.sampled_from([0, 2, "auto"]),
                st.sampled_from([None, 0.0, 1.0]),
                st.one_of(
                    st.none(),
                    st.dictionaries(st.sampled_from("ab"), st.sampled_from([1, 2, [], {}])),
                ),
            ),
            min_size=2,
            max_size=2,
        )
    )
    def test_a_difference_is_false_exactly_when_plans_are_equal(self, configs):
        one, other = (DeepSpeedPlan.from_dict(config) for config in configs)
        forth, back = one.diff(other), other.diff(one)

        assert bool(forth) == (one != other)
        assert {(c.key, str(c.before), str(c.after)) for c in forth.changes} == {
            (c.key, str(c.after), str(c.before)) for c in back.changes
        }


class TestResolvedPlans:
    def resolve(self, world_size=1, **build):
        plan = DeepSpeedPlan.build(**{"stage": 2, "offload": "cpu", "precision": "bf16", **build})
        return plan.resolve(platform=Platform.synthetic("cuda"), world_size=world_size)

    def test_reasons_of_decisions_are_not_compared(self):
        one = self.resolve()
        assert not one.diff(attrs.evolve(one, decisions=()))

    def test_stages_and_offload_are_compared(self):
        found = changes(self.resolve().diff(self.resolve(stage=3, offload="nvme")))

        assert found["zero_optimization.stage"] == ("changed", 2, 3)
        assert found["zero_optimization.sub_group_size"][0] == "added"

    def test_optimizer_and_schedule_are_compared(self):
        one = attrs.evolve(self.resolve(), optimizer=ADAMW, scheduler=None)
        other = attrs.evolve(
            self.resolve(),
            optimizer=attrs.evolve(ADAMW, params={"lr": 2e-4}, implementation="FusedAdam"),
            scheduler=WARMUP,
        )

        assert changes(one.diff(other)) == {
            "optimizer.params.lr": ("changed", 1e-4, 2e-4),
            "optimizer.implementation": ("changed", "DeepSpeedCPUAdam", "FusedAdam"),
            "scheduler.type": ("added", None, "WarmupLR"),
            "scheduler.source": ("added", None, "deepspeed"),
            "scheduler.params.warmup_num_steps": ("added", None, 10),
        }

    def test_parameter_groups_are_compared_by_name(self):
        groups = [
            GroupChoice(name="decay", params={"lr": 1e-4}, parameters=("a",), numel=1),
            GroupChoice(name="no_decay", params={"lr": 1e-4}, parameters=("b", "c"), numel=2),
        ]
        grouped = attrs.evolve(ADAMW, groups=tuple(groups))
        groups[1] = attrs.evolve(groups[1], params={"lr": 1e-5})
        one = attrs.evolve(self.resolve(), optimizer=grouped, scheduler=None)
        other = attrs.evolve(
            self.resolve(), optimizer=attrs.evolve(ADAMW, groups=tuple(groups)), scheduler=None
        )

        assert changes(one.diff(other)) == {
            "optimizer.groups.no_decay.params.lr": ("changed", 1e-4, 1e-5)
        }

    def test_an_optimizer_that_the_engine_builds_is_compared(self):
        torch = attrs.evolve(ADAMW, source="torch", implementation="AdamW")
        one = attrs.evolve(self.resolve(), optimizer=torch, scheduler=None)
        other = attrs.evolve(
            self.resolve(), optimizer=attrs.evolve(torch, params={"lr": 3e-4}), scheduler=None
        )

        assert changes(one.diff(other)) == {"optimizer.params.lr": ("changed", 1e-4, 3e-4)}

    def test_world_size_and_engine_are_compared(self):
        plan = DeepSpeedPlan.build(stage=2, precision="fp32")
        one = plan.resolve(platform=Platform.synthetic("cuda"), world_size=1)
        other = plan.resolve(platform=Platform.synthetic("cuda"), world_size=1, deepspeed=False)

        assert changes(one.diff(other))["uses_deepspeed"] == ("changed", True, False)
        assert changes(self.resolve().diff(self.resolve(world_size=2)))["world_size"] == (
            "changed", 1, 2,
        )  # fmt: skip

    def test_swap_folders_are_compared(self):
        one = self.resolve(stage=3, offload="nvme")
        assert changes(one.diff(one.with_nvme_path(optimizer="/mnt/x"))) == {
            "zero_optimization.offload_optimizer.nvme_path": ("added", None, "/mnt/x")
        }

    def test_equal_digests_mean_no_difference(self):
        one, other = (
            attrs.evolve(self.resolve(), optimizer=ADAMW, scheduler=WARMUP) for _ in range(2)
        )
        assert one.digest() == other.digest()
        assert not one.diff(other)


def test_comparing_a_plan_with_a_resolved_one_is_refused(reference_a, cuda):
    plan = DeepSpeedPlan.from_dict(reference_a)
    resolved = plan.resolve(platform=cuda)

    with pytest.raises(InvalidValueError, match="can only be compared with a DeepSpeedPlan"):
        plan.diff(resolved)
    with pytest.raises(InvalidValueError, match="can only be compared with a ResolvedPlan"):
        resolved.diff(plan)
