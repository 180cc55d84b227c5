"""Form states as a page would send them."""

from __future__ import annotations

PLAN = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}
CHOSEN = {"family": "sdxl", "vram": "24", "ram": "64", "world_size": 1}


def state(config=None, setup=None, launch=None):
    return {
        "config": PLAN if config is None else config,
        "launch": launch or {},
        "setup": {**CHOSEN, **(setup or {})},
    }
