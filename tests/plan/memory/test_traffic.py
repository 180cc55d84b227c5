"""Bytes a step reads and writes, compared with the kernel's counts in real runs."""

from __future__ import annotations

from zerotune.plan.facts import ModelFacts
from zerotune.plan.memory.traffic import SwapTraffic
from zerotune.plan.plan import DeepSpeedPlan
from zerotune.platform import Platform

MODEL = ModelFacts.from_shapes([(f"{i}.weight", (1536, 1536)) for i in range(12)])
N = MODEL.numel


def traffic(precision="bf16", accumulation=1, optimizer="AdamW", ema="none", **offload):
    plan = DeepSpeedPlan.build(
        stage=3,
        precision=precision,
        gradient_accumulation_steps=accumulation,
        optimizer=optimizer,
        **offload,
    )
    estimate = plan.estimate(MODEL, platform=Platform.synthetic("cuda"), ema=ema)
    return estimate.swap_traffic


# /proc/self/io of DeepSpeed 0.19.8 on the CPU accelerator, bytes per element and step: with this
# model 16.00/16.00 for the optimizer alone in fp32, 12.00/12.00 with Adagrad's one state, and
# 4 + 16 / 18 with bf16 parameters, 8 + 16 / 18 with two micro batches.
def test_adam_reads_and_writes_sixteen_bytes_per_element():
    assert traffic(offload="nvme") == SwapTraffic(read=16 * N, written=16 * N)
    assert traffic(offload="nvme", optimizer="Adagrad") == SwapTraffic(read=12 * N, written=12 * N)


def test_parameters_are_read_twice_per_micro_batch_and_written_once():
    both = {"offload": "nvme", "offload_param": "nvme"}
    assert traffic(**both) == SwapTraffic(read=20 * N, written=18 * N)
    assert traffic(**both, accumulation=2) == SwapTraffic(read=24 * N, written=18 * N)


def test_without_nvme_there_is_no_traffic():
    assert traffic(offload="cpu") == SwapTraffic(read=0, written=0)
    # An EMA in a file does not count as DeepSpeed's swap.
    assert traffic(offload="nvme", ema="nvme") == traffic(offload="nvme")
