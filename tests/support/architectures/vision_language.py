# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Models of images together with texts."""

import functools
from typing import Dict

from support.architectures.batches import (
    IMAGE,
    captioned_images,
    contrasted_images,
    described_images,
    patched_images,
    several_images,
)
from support.architectures.entries import LANGUAGE, SIZES, Architecture, architectures

EYES = dict(**SIZES, image_size=16, patch_size=8)  # four patches
CLIP_EYES = dict(**EYES, model_type="clip_vision_model")
SIGLIP_EYES = dict(**EYES, model_type="siglip_vision_model")
SMALL_PATCHES = dict(EYES, patch_size=4)
LLAMA = dict(**LANGUAGE, model_type="llama")
QWEN = dict(**LANGUAGE, rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 1, 1]))
QWEN_EYES = dict(depth=2, num_heads=4, patch_size=4, hidden_size=32)

VISION_LANGUAGE_MODELS: Dict[str, Architecture] = {
    **architectures(
        "vision-language",
        contrasted_images,
        "Model",
        dict(text_config=LANGUAGE, vision_config=EYES, projection_dim=16),
        {
            "CLIP": {},
            "Siglip": dict(text_config=dict(LANGUAGE, projection_size=32)),
            "ChineseCLIP": {},
        },
    ),
    **architectures(
        "vision-language",
        described_images,
        "ForConditionalGeneration",
        dict(text_config=LLAMA, vision_config=CLIP_EYES, image_token_id=IMAGE, image_token_index=IMAGE),
        {
            "Llava": {},
            "VipLlava": dict(vision_feature_layers=[-2, -1]),
            "AyaVision": dict(
                text_config=dict(LANGUAGE, model_type="cohere2", sliding_window=8),
                vision_config=dict(SMALL_PATCHES, model_type="siglip_vision_model"),
                downsample_factor=2,
                vision_feature_select_strategy="full",
            ),
            "InternVL": dict(vision_config=dict(SMALL_PATCHES, image_size=[16, 16], patch_size=[4, 4])),
            "PaliGemma": dict(
                text_config=dict(LANGUAGE, model_type="gemma", head_dim=8),
                vision_config=dict(SIGLIP_EYES, projection_dim=32),
                projection_dim=32,
                batch=functools.partial(described_images, type_of_images=0),
            ),
            "Gemma3": dict(
                text_config=dict(LANGUAGE, head_dim=8, sliding_window=8),
                vision_config=dict(SMALL_PATCHES, model_type="siglip_vision_model"),
                mm_tokens_per_image=4,
                batch=functools.partial(described_images, type_of_images=1),
            ),
            "Blip2": dict(
                text_config=dict(LANGUAGE, model_type="opt", ffn_dim=64, word_embed_proj_dim=32),
                vision_config=EYES,
                qformer_config=dict(LANGUAGE, encoder_hidden_size=32),
                num_query_tokens=4,
            ),
            "Idefics3": dict(vision_config=SMALL_PATCHES, batch=several_images),
            "SmolVLM": dict(vision_config=SMALL_PATCHES, batch=several_images),
            "Blip": dict(
                text_config=dict(LANGUAGE, encoder_hidden_size=32), vision_config=EYES, batch=captioned_images
            ),
        },
    ),
    **architectures(
        "vision-language",
        captioned_images,
        "ForCausalLM",
        LANGUAGE,
        {
            "Git": dict(vision_config=EYES),
        },
    ),
    **architectures(
        "vision-language",
        patched_images,
        "ForConditionalGeneration",
        dict(text_config=QWEN, image_token_id=IMAGE),
        {
            "Qwen2VL": dict(vision_config=dict(QWEN_EYES, embed_dim=32, mlp_ratio=2)),
            "Qwen2_5_VL": dict(
                vision_config=dict(
                    QWEN_EYES, intermediate_size=64, out_hidden_size=32, window_size=8, fullatt_block_indexes=[1]
                )
            ),
            "Qwen3VL": dict(
                text_config=dict(QWEN, head_dim=8),
                vision_config=dict(
                    **dict(QWEN_EYES, intermediate_size=64, out_hidden_size=32, num_position_embeddings=16),
                    deepstack_visual_indexes=[0],
                ),
            ),
        },
    ),
}
