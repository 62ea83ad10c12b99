# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Models of images and videos."""

from typing import Dict

from support.architectures.batches import CLASSES, labelled_pixels, labelled_video, masked_pixels, segmented_pixels
from support.architectures.entries import SIZES, Architecture, architectures

IMAGES = dict(num_labels=CLASSES, image_size=16)
STAGES = dict(num_labels=CLASSES, hidden_sizes=[16, 32], depths=[1, 2])
WINDOWS = dict(IMAGES, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)

VISION_MODELS: Dict[str, Architecture] = {
    **architectures(
        "vision",
        labelled_pixels,
        "ForImageClassification",
        dict(SIZES, **IMAGES, patch_size=4),
        {
            "ViT": {},
            "DeiT": {},
            "Beit": {},
            "Dinov2": {},
            "Dinov2WithRegisters": {},
            "Data2VecVision": {},
            "ViTMasked": dict(model="ViTForMaskedImageModeling", batch=masked_pixels, encoder_stride=4),
            "VideoMAE": dict(model="VideoMAEForVideoClassification", batch=labelled_video, num_frames=4),
            "Timesformer": dict(model="TimesformerForVideoClassification", batch=labelled_video, num_frames=4),
        },
    ),
    **architectures(
        "vision",
        labelled_pixels,
        "ForImageClassification",
        {},
        {
            "Swin": WINDOWS,
            "Swinv2": WINDOWS,
            "ConvNext": dict(STAGES, patch_size=2, num_stages=2),
            "ConvNextV2": dict(STAGES, patch_size=2, num_stages=2),
            "ResNet": dict(STAGES, embedding_size=16, layer_type="basic"),
            "PoolFormer": dict(STAGES, num_encoder_blocks=2, patch_sizes=[3, 3], strides=[2, 2], padding=[1, 1]),
            "FocalNet": dict(
                **dict(IMAGES, patch_size=2, embed_dim=16, hidden_sizes=[16, 32], depths=[1, 1]),
                **dict(focal_levels=[2, 2], focal_windows=[3, 3]),
            ),
            "Segformer": dict(
                **dict(STAGES, num_encoder_blocks=2, sr_ratios=[2, 1], patch_sizes=[7, 3], strides=[4, 2]),
                **dict(num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16),
                **dict(model="SegformerForSemanticSegmentation", batch=segmented_pixels),
            ),
        },
    ),
}
