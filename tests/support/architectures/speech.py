# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Models of speech and other sounds."""

import functools
from typing import Dict

from support.architectures.batches import (
    BOS,
    CLASSES,
    FRAMES,
    LENGTH,
    MEL_BINS,
    labelled_spectrograms,
    transcribed_audio,
    transcribed_features,
)
from support.architectures.entries import ENCODER_DECODER, SIZES, SPECIAL, Architecture, architectures

AUDIO = dict(
    **dict(SPECIAL, **SIZES, conv_dim=[16, 16, 16], conv_kernel=[10, 3, 2], conv_stride=[10, 4, 2]),
    **dict(num_feat_extract_layers=3, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2),
    **dict(ctc_loss_reduction="mean", ctc_zero_infinity=True),
)

SPEECH_MODELS: Dict[str, Architecture] = {
    **architectures(
        "speech",
        transcribed_audio,
        "ForCTC",
        AUDIO,
        {
            "Wav2Vec2": {},
            "Wav2Vec2LayerNorm": dict(model="Wav2Vec2ForCTC", feat_extract_norm="layer", do_stable_layer_norm=True),
            "Wav2Vec2Conformer": dict(conv_depthwise_kernel_size=3),
            "Wav2Vec2Bert": dict(
                **dict(feature_projection_input_dim=MEL_BINS, conv_depthwise_kernel_size=3),
                **dict(left_max_position_embeddings=8, right_max_position_embeddings=4, batch=transcribed_features),
            ),
            "Hubert": {},
            "WavLM": dict(num_buckets=8, max_bucket_distance=16),
            "UniSpeechSat": {},
            "SEW": dict(squeeze_factor=2),
            "Data2VecAudio": dict(conv_pos_kernel_size=3, num_conv_pos_embeddings=2),
        },
    ),
    **architectures(
        "speech",
        transcribed_features,
        "ForConditionalGeneration",
        ENCODER_DECODER,
        {
            "Whisper": dict(
                **dict(num_mel_bins=MEL_BINS, max_source_positions=FRAMES // 2, max_target_positions=LENGTH),
                batch=functools.partial(transcribed_features, frames_last=True),
            ),
            "Speech2Text": dict(
                **dict(conv_channels=32, input_feat_per_channel=MEL_BINS),
                **dict(max_source_positions=FRAMES, max_target_positions=LENGTH),
            ),
        },
    ),
    **architectures(
        "speech",
        labelled_spectrograms,
        "ForAudioClassification",
        dict(SIZES, num_labels=CLASSES),
        {
            "AST": dict(patch_size=8, frequency_stride=8, time_stride=8, max_length=FRAMES, num_mel_bins=MEL_BINS),
        },
    ),
    **architectures(
        "speech",
        transcribed_audio,
        "ForConditionalGeneration",
        dict(SPECIAL, hidden_size=32, intermediate_size=64, max_position_embeddings=64),
        {
            "Moonshine": dict(
                **dict(encoder_num_hidden_layers=2, encoder_num_attention_heads=4, decoder_start_token_id=BOS),
                **dict(decoder_num_hidden_layers=2, decoder_num_attention_heads=4),
            ),
        },
    ),
}
