# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Architectures of ``transformers``, each as a model of a few layers with random weights.

Training draws no random numbers: dropout and the like are off. The rest is as transformers has it by default, above
all ``use_cache``, the implementation of attention and which weights are tied.
"""

from typing import Dict

from support.architectures.entries import Architecture
from support.architectures.language import LANGUAGE_MODELS
from support.architectures.speech import SPEECH_MODELS
from support.architectures.vision import VISION_MODELS
from support.architectures.vision_language import VISION_LANGUAGE_MODELS

ARCHITECTURES: Dict[str, Architecture] = {
    **LANGUAGE_MODELS,
    **VISION_MODELS,
    **SPEECH_MODELS,
    **VISION_LANGUAGE_MODELS,
}

# At least one of each kind, quick to make and to compile.
IN_EVERY_RUN = (
    *("Qwen3", "GPT2", "GptOss", "Mamba2", "Lfm2", "ModernBert"),
    *("T5", "Dinov2", "ResNet", "Wav2Vec2", "CLIP", "Llava"),
)
