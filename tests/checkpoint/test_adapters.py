"""LoRA files: how diffusers reads them, and which are never written."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path

import attrs
import pytest
import torch

from tests.diffusion.adapting import (
    PLAIN_RUN,
    Adapted,
    loaded,
    output_of,
    output_without_engine,
    start,
    step,
)
from tests.support.needs import needs
from zerotune.backend.stored import read_header
from zerotune.checkpoint import export_adapters, export_model
from zerotune.diffusion import LoRA
from zerotune.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    InvalidValueError,
)

peft = needs("peft")

PATTERNS = LoRA(
    rank=4,
    alpha=6,
    dora=True,
    targets=("to_q", "to_k", "conv1", "time_emb_proj"),
    rank_pattern={"mid_block.*to_q": 2},
    alpha_pattern={"to_k": 3},
)
KINDS = {
    "unet": Adapted(),
    "dora": Adapted(lora=PATTERNS),
    "sd3": Adapted(kind="sd3", lora=LoRA(rank=4, alpha=2)),
    "text": Adapted(kind="text"),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # Closing an engine collects garbage, which would scan all of transformers each time.
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


_trained: dict[str, dict[str, torch.Tensor]] = {}


@pytest.fixture
def runs(fresh):
    """Return a function that returns an engine of a kind, with adapters trained for three steps."""

    def get(kind):
        adapted = KINDS[kind]
        if kind not in _trained:
            first = fresh(adapted, steps=3)
            _trained[kind] = {n: t.clone() for n, t in first.module.state_dict().items()}
            return first, adapted
        model = adapted.model()
        model.load_state_dict(_trained[kind])
        return fresh(adapted, steps=0, model=model, pretended=3), adapted

    return get


@pytest.fixture
def fresh():
    """Return a function that starts a new engine, which the test may damage."""
    engines = []

    def get(adapted, steps=2, model=None, pretended=None):
        engines.append(start(PLAIN_RUN, model or adapted.model()))
        for index in range(steps):
            step(engines[-1], adapted, index)
        if pretended is not None:
            state = attrs.evolve(engines[-1].state, global_step=pretended)
            engines[-1].load_state(state)
        return engines[-1]

    yield get
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_pipeline_gives_the_trained_output_bit_for_bit(kind, runs, tmp_path):
    from diffusers import StableDiffusion3Pipeline, StableDiffusionXLPipeline

    engine, adapted = runs(kind)
    base = adapted.base()
    names = dict(base.items()) if kind == "text" else {"unet": base}
    empty = dict.fromkeys(("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    if kind == "sd3":
        more = dict.fromkeys(("text_encoder_3", "tokenizer_3"))
        pipeline = StableDiffusion3Pipeline(
            **empty, **more, transformer=base, scheduler=_scheduler()
        )
    else:
        pipeline = StableDiffusionXLPipeline(**{**empty, **names}, scheduler=_scheduler())
    file = export_adapters(tmp_path, engine=engine, pipeline=pipeline)
    assert file.path == tmp_path / "pytorch_lora_weights.safetensors"
    assert os.fspath(file) == str(file.path)
    assert file.nbytes == file.path.stat().st_size
    before = output_without_engine(adapted.base(), adapted, torch.float32)
    pipeline.load_lora_weights(tmp_path)
    expected = output_of(engine, adapted)
    assert torch.equal(output_without_engine(base, adapted, torch.float32), expected)
    assert not torch.allclose(before, expected, rtol=1e-3)


def _scheduler():
    from diffusers import DDPMScheduler

    return DDPMScheduler()


@pytest.mark.parametrize("kind", ["unet", "dora"])
def test_the_file_equals_the_one_that_diffusers_writes(kind, runs, tmp_path):
    from diffusers import StableDiffusionXLPipeline
    from peft import LoraConfig, get_peft_model_state_dict
    from safetensors.torch import load_file

    engine, _ = runs(kind)
    ours = export_adapters(tmp_path / "ours", engine=engine)
    config = engine.module.peft_config["default"]
    StableDiffusionXLPipeline.save_lora_weights(
        tmp_path / "theirs",
        unet_lora_layers=get_peft_model_state_dict(engine.module),
        unet_lora_adapter_metadata=config.to_dict(),
    )
    theirs = tmp_path / "theirs" / ours.path.name
    mine, other = load_file(ours), load_file(theirs)
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[key], other[key]) for key in mine)
    settings, full = (
        {k.removeprefix("unet."): v for k, v in json.loads(text).items()}
        for text in (read_header(path)[1]["lora_adapter_metadata"] for path in (ours.path, theirs))
    )
    again, original = LoraConfig(**settings), LoraConfig(**full)
    for key in ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_dora", "target_modules"):
        assert getattr(again, key) == getattr(original, key), key
    # Settings at their defaults are omitted, as an older peft may not know them.
    assert len(settings) < len(full)


def test_a_model_folder_cannot_hold_adapters(runs, tmp_path):
    engine, _ = runs("sd3")
    with pytest.raises(CheckpointMismatchError, match="belongs to an adapter"):
        export_model(tmp_path / "x", engine=engine)
    assert not (tmp_path / "x").exists()


def test_layers_outside_the_loss_get_a_warning(runs, tmp_path):
    engine, _ = runs("sd3")
    file = export_adapters(tmp_path, engine=engine)
    (told,) = file.decisions
    assert told.severity == "warning"
    assert "1 of 15 layers have not changed" in told.reason
    assert "transformer_blocks.1.attn.add_q_proj" in told.reason


def test_exporting_before_the_first_step_gives_a_warning(fresh, tmp_path):
    (told,) = export_adapters(tmp_path, engine=fresh(KINDS["sd3"], steps=0)).decisions
    assert "no optimizer step was taken" in told.reason


def edit(engine, change):
    with engine.master_weights.editing() as fragments:
        for fragment in fragments:
            change(fragment)


def test_adapters_that_are_still_zero_are_refused(fresh, tmp_path):
    engine = fresh(KINDS["unet"])
    edit(engine, lambda f: f.value.zero_() if "lora_B" in f.address.name else None)
    with pytest.raises(CheckpointCorruptError, match="every lora_B is zero") as caught:
        export_adapters(tmp_path, engine=engine)
    assert "none of the 64 adapters has changed in 2 steps" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_component_that_learned_nothing_is_refused(fresh, tmp_path):
    engine = fresh(KINDS["text"])
    idle = [name for name in engine.master_weights.parameters if name.startswith("text_encoder.")]
    edit(
        engine,
        lambda f: f.value.zero_() if f.address.name in idle and "_B" in f.address.name else None,
    )
    with pytest.raises(CheckpointCorruptError, match=r"^text_encoder: none of the 8 adapters"):
        export_adapters(tmp_path, engine=engine)


def test_values_beyond_the_range_of_the_files_dtype_are_refused(fresh, tmp_path):
    engine = fresh(KINDS["sd3"])
    edit(engine, lambda f: f.value[0].fill_(1e5))
    with pytest.raises(CheckpointCorruptError, match=r"not finite in torch\.float16"):
        export_adapters(tmp_path, engine=engine, dtype="fp16")
    assert not list(tmp_path.iterdir())
    export_adapters(tmp_path, engine=engine, dtype="bf16")


def test_trained_weights_that_an_adapter_file_cannot_hold_are_refused(fresh, tmp_path):
    model = KINDS["unet"].model()
    model.conv_out.bias.requires_grad_(True)
    engine = fresh(KINDS["unet"], steps=1, model=model)
    with pytest.raises(CheckpointMismatchError, match=r"conv_out\.bias: is trained"):
        export_adapters(tmp_path, engine=engine)


def test_a_model_without_adapters_has_none_to_export(fresh, tmp_path):
    engine = fresh(KINDS["unet"], steps=0, model=KINDS["unet"].base())
    with pytest.raises(CheckpointMismatchError, match="trains no adapters"):
        export_adapters(tmp_path / "x", engine=engine)
    assert not list(tmp_path.iterdir())


def test_component_names_must_be_those_of_the_pipeline(runs, tmp_path):
    from diffusers import FluxPipeline, StableDiffusionXLPipeline

    engine, _ = runs("unet")
    with pytest.raises(InvalidValueError, match="load adapters only for: transformer"):
        export_adapters(tmp_path, engine=engine, pipeline=FluxPipeline)
    renamed = export_adapters(
        Path(tmp_path, "x.safetensors"),
        engine=engine,
        component="text_encoder",
        pipeline=StableDiffusionXLPipeline,
    )
    assert all(key.startswith("text_encoder.") for key in read_header(renamed.path)[0])


def test_a_peft_folder_gives_the_trained_output_bit_for_bit(runs, tmp_path):
    from peft import PeftModel

    engine, adapted = runs("sd3")
    folder = export_adapters(tmp_path / "peft", engine=engine, layout="peft")
    assert sorted(each.name for each in folder.path.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    expected = output_of(engine, adapted)
    theirs = PeftModel.from_pretrained(adapted.base(), folder.path)
    assert torch.equal(output_without_engine(theirs, adapted, torch.float32), expected)
    ours = loaded(adapted, folder)
    assert torch.equal(output_without_engine(ours, adapted, torch.float32), expected)
    again = export_adapters(tmp_path / "peft", engine=engine, layout="peft", dtype="bf16")
    assert again.nbytes < folder.nbytes
    (folder.path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has changed since zerotune wrote it"):
        export_adapters(tmp_path / "peft", engine=engine, layout="peft")


OTHERS = {
    "rslora": LoRA(rank=4, alpha=8, rslora=True),
    "lokr": peft.LoKrConfig(r=4, alpha=8),
    "loha": peft.LoHaConfig(r=4, alpha=4, target_modules=["to_q", "to_k"]),
    "oft": peft.OFTConfig(oft_block_size=8),
}


@pytest.mark.parametrize("kind", list(OTHERS))
def test_other_adapter_kinds_can_be_exported(kind, fresh, tmp_path):
    adapted = Adapted(kind="sd3", lora=OTHERS[kind])
    engine = fresh(adapted)
    expected = output_of(engine, adapted)
    layout = "diffusers" if kind in ("rslora", "lokr") else "peft"
    for each in {layout, "peft"}:
        file = export_adapters(tmp_path / each, engine=engine, layout=each)
        model = loaded(adapted, file)
        assert torch.equal(output_without_engine(model, adapted, torch.float32), expected)
    if layout == "peft":
        with pytest.raises(CheckpointMismatchError, match=r"does not support (LoHa|OFT)"):
            export_adapters(tmp_path / "x", engine=engine)
        assert not (tmp_path / "x").exists()


def test_a_layout_that_cannot_hold_the_adapters_is_refused(runs, tmp_path):
    text, _ = runs("text")
    sd3, _ = runs("sd3")
    with pytest.raises(CheckpointMismatchError, match="adapters of only one model"):
        export_adapters(tmp_path / "x", engine=text, layout="peft")
    with pytest.raises(InvalidValueError, match="is not an adapter layout"):
        export_adapters(tmp_path / "x", engine=sd3, layout="comfy")
    assert not list(tmp_path.iterdir())


def test_training_continues_from_an_exported_file(runs, fresh, tmp_path):
    engine, adapted = runs("dora")
    file = export_adapters(tmp_path / "first", engine=engine)
    again = fresh(adapted, steps=0, model=loaded(adapted, file), pretended=1)
    assert again.master_weights.parameters == engine.master_weights.parameters
    assert torch.equal(output_of(again, adapted), output_of(engine, adapted))
    step(again, adapted, 5)
    model = loaded(adapted, export_adapters(tmp_path / "second", engine=again))
    output = output_without_engine(model, adapted, torch.float32)
    assert torch.equal(output, output_of(again, adapted))
    assert not torch.equal(output, output_of(engine, adapted))
