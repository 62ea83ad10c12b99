# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``fits`` leaves out it says, and no network, model or number of GPUs makes it wait for long."""

import json
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from deepspeed.compile.fits import fits
from deepspeed.compile.tools.fits import gradients, sources, time_limit
from deepspeed.compile.tools.fits.advice import text_of
from deepspeed.compile.tools.fits.modes import Mode

from support.ids import vary
from support.models import TEXT_SIZES as TEXT

PLAIN = Mode("plain")
NEEDS_TRANSFORMERS = "a configuration needs transformers: requirements/benchmarks.txt"


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)

    def forward(self, input_ids):
        return self.embedding(input_ids).square().mean()


class ReadsImages(Reads):
    def forward(self, input_ids, pixel_values=None, input_features=None):
        return super().forward(input_ids)


def of_images(answer):
    return [note for note in answer.notes if "are not counted" in note]


def test_images_are_not_counted():
    """A model of text and images would be taken for one of text, and the figures for those of its training."""
    (note,) = of_images(fits(ReadsImages, modes=[PLAIN], sequence=4))
    assert note.startswith("Images and recordings are not counted: what reads them has activations and gradients")
    # Of text, and of what the caller's batch has.
    assert of_images(fits(Reads, modes=[PLAIN], sequence=4)) == []
    ids = {"input_ids": torch.zeros(1, 4, dtype=torch.long)}
    assert of_images(fits(ReadsImages, modes=[PLAIN], batch=lambda *_: ids)) == []


TOWER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 56,
}
ROTARY = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
SEEING = {
    "LlavaForConditionalGeneration": {
        "model_type": "llava",
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**TOWER, "model_type": "clip_vision_model", "patch_size": 14},
    },
    "Gemma3ForConditionalGeneration": {
        "model_type": "gemma3",
        "text_config": {**TEXT, "head_dim": 16},
        "vision_config": {**TOWER, "patch_size": 14},
        "mm_tokens_per_image": 4,
    },
    "Qwen2_5_VLForConditionalGeneration": {
        "model_type": "qwen2_5_vl",
        "text_config": {**TEXT, "rope_parameters": ROTARY},
        "vision_config": {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4},
    },
    # Its class is one of models with images.
    "Gemma3ForCausalLM": {"model_type": "gemma3_text", **TEXT, "head_dim": 16},
}


@pytest.mark.slow
@vary("kind", SEEING)
def test_models_of_images(tmp_path, kind):
    """Models of transformers would read images under other names, or one of text alone be taken for one of them."""
    pytest.importorskip("transformers", reason=NEEDS_TRANSFORMERS)
    (tmp_path / "config.json").write_text(json.dumps({**SEEING[kind], "architectures": [kind]}))
    with torch.device("meta"):
        model = sources.named(str(tmp_path))()
    assert type(model).__name__ == kind
    assert sources.unread(model) == (["images"] if "vision_config" in SEEING[kind] else [])


class Slow(Reads):
    """Takes half a second, which no single call takes."""

    def forward(self, input_ids):
        for _ in range(50):
            time.sleep(0.01)
        return super().forward(input_ids)


@pytest.mark.follows("give it more time with --seconds")
def test_what_is_known_when_time_is_over():
    """The command would trace for hours, or end without the weights, gradients and states that it knows."""
    asked = {"modes": [PLAIN, Mode("8-bit states", eight_bit=True)], "gpus": 2, "sequence": 4}
    late = fits(Slow, seconds=0.05, **asked)
    assert [late.verdict(row) for row in late.rows] == ["unknown"] * 2
    assert all(row.forward is None and {"parameters", "moments", "gradients"} <= {*row.parts} for row in late.rows)
    text = " ".join(text_of(late, "slow", shows_all=False))
    assert "Tracing took more than 0.05 s: rows that say unknown have weights, gradients and states" in text
    assert "above 0.2  unknown" in text and 'Without activations, "plain" on rank 0, 0.19 GiB: ' in text
    assert "Recommended: no mode, because activations are unknown" in text
    assert type(torch.ones(1)) is torch.Tensor
    known = fits(Slow, seconds=60, **asked)
    assert [known.verdict(row) for row in known.rows] == ["yes"] * 2 and not any("Tracing" in n for n in known.notes)


def test_a_user_interrupts():
    """The command would go on until the time is over, or what it traces would go on behind it."""
    ended = threading.Event()

    def endless():
        try:
            while True:
                time.sleep(0.01)
        finally:
            ended.set()

    interrupts = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    interrupts.start()
    with pytest.raises(KeyboardInterrupt):
        time_limit.within(600, endless)
    assert ended.wait(60)


@pytest.mark.follows("name a folder with its config.json, or a model of the cache")
def test_without_a_network(tmp_path, monkeypatch):
    """Transformers would ask the hub again and again for a minute, also for a model whose configuration is here."""
    pytest.importorskip("transformers", reason=NEEDS_TRANSFORMERS)
    import huggingface_hub
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(sources.Unusable, match="some/model is no folder .* and http://127.0.0.1:9 cannot be rea"):
        sources.named("some/model")
    # A network that swallows what is sent.
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: SimpleNamespace(head=lambda *_, **__: time.sleep(60)))
    monkeypatch.setattr(sources, "HUB_SECONDS", 0.1)
    with pytest.raises(
        sources.Unusable, match=r"cannot be reached \(no answer within 0.1 s\); name a folder with its"
    ):
        sources.named("some/model")
    folder = tmp_path / "models--some--model" / "snapshots" / "of-a-commit"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **TEXT}))
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs" / "main").write_text(folder.name)
    assert callable(sources.named(str(folder))) and callable(sources.named("some/model"))


def test_thousands_of_gpus():
    """What is the same for each rank would be computed for each, for minutes."""
    flat = [nn.Parameter(torch.empty(64, 64, device="meta")) for _ in range(64)]

    def taken(ranks):
        began = time.process_time()
        gradients.send(flat, [*reversed(range(64))], ranks)
        gradients.gathered_in_step(flat, ranks)
        return time.process_time() - began

    taken(3)
    few, many = taken(3), taken(3000)
    assert many < 5 * few + 0.1
