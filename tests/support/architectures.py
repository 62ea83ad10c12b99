# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Architectures of ``transformers``, each as a model of a few layers with random weights.

Training draws no random numbers: dropout and the like are off. The rest is as transformers has it by default, above
all ``use_cache``, the implementation of attention and which weights are tied.
"""

import copy
import functools
from typing import Any, Callable, Dict, NamedTuple

import torch

VOCABULARY = 96
LENGTH = 20  # tokens
PAD, BOS, EOS, MASK, IMAGE = 0, 1, 2, 3, 4  # tokens; IMAGE stands where the features of an image go
FIRST_TOKEN = 8  # the first one that means nothing in particular
CLASSES = 5
SAMPLES = 1600  # of audio
MEL_BINS, FRAMES = 16, 40

RANDOM = ("drop", "jitter", "mask_time_prob", "mask_feature_prob")  # parts of the names of rates that are set to 0


class Architecture(NamedTuple):
    """A model with random weights, to be made after ``torch.manual_seed``, and what it is trained on."""

    kind: str
    make: Callable[[], torch.nn.Module]
    batch: Callable[[int, int], Dict[str, Any]]  # (seed, rows) -> arguments of forward, which returns a loss


# Batches: the same for the same seed and number of rows


def draw(seed):
    return torch.Generator().manual_seed(seed)


def random_tokens(generator, rows, length=LENGTH):
    return torch.randint(FIRST_TOKEN, VOCABULARY, (rows, length), generator=generator)


def random_pixels(generator, rows, size, channels=3):
    return torch.randn(rows, channels, size, size, generator=generator)


def prompts_ignored(ids, generator):
    """Labels for the ids, without those of the first one to four tokens of every row."""
    lengths = torch.randint(1, 5, (len(ids), 1), generator=generator)
    return ids.masked_fill(torch.arange(ids.shape[1]) < lengths, -100)


def padding(ids):
    """A mask that hides the last tokens of every other row."""
    mask = torch.ones_like(ids)
    mask[::2, -3:] = 0
    return mask


def tokens(seed, rows):
    """What causal language models are trained on."""
    generator = draw(seed)
    ids = random_tokens(generator, rows)
    return {"input_ids": ids, "labels": prompts_ignored(ids, generator)}


def masked_tokens(seed, rows):
    """What encoders are trained on: to fill in a quarter of the tokens, beside padding."""
    generator = draw(seed)
    ids = random_tokens(generator, rows)
    mask = padding(ids)
    hidden = (torch.rand(ids.shape, generator=generator) < 0.25) & (mask == 1)
    hidden[:, 1] = True
    return {
        "input_ids": ids.masked_fill(hidden, MASK).masked_fill(mask == 0, PAD),
        "attention_mask": mask,
        "labels": ids.masked_fill(~hidden, -100),
    }


def whole_masked_tokens(seed, rows):
    """The same without padding, for models that take no mask."""
    generator = draw(seed)
    ids = random_tokens(generator, rows)
    hidden = torch.rand(ids.shape, generator=generator) < 0.25
    hidden[:, 1] = True
    return {"input_ids": ids.masked_fill(hidden, MASK), "labels": ids.masked_fill(~hidden, -100)}


def labelled_tokens(seed, rows):
    """A class for every row of tokens."""
    batch = masked_tokens(seed, rows)
    return {**batch, "labels": torch.randint(CLASSES, (rows,), generator=draw(seed + 1))}


def sequence_pairs(seed, rows):
    """Sequences of tokens to be turned into shorter ones."""
    generator = draw(seed)
    ids = random_tokens(generator, rows)
    mask = padding(ids)
    labels = random_tokens(generator, rows, LENGTH - 4)
    labels[::2, -2:] = -100
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask, "labels": labels}


def labelled_pixels(seed, rows, size=16):
    """A class for every image."""
    generator = draw(seed)
    return {
        "pixel_values": random_pixels(generator, rows, size),
        "labels": torch.randint(CLASSES, (rows,), generator=generator),
    }


def segmented_pixels(seed, rows, size=32):
    """A class for every pixel, but for some without."""
    generator = draw(seed)
    labels = torch.randint(CLASSES, (rows, size, size), generator=generator)
    labels[:, :2] = 255
    return {"pixel_values": random_pixels(generator, rows, size), "labels": labels}


def labelled_video(seed, rows, size=16, frames=4):
    """A class for every video."""
    generator = draw(seed)
    return {
        "pixel_values": torch.randn(rows, frames, 3, size, size, generator=generator),
        "labels": torch.randint(CLASSES, (rows,), generator=generator),
    }


def masked_pixels(seed, rows, size=16, patch=4):
    """Images of which some patches are hidden."""
    generator = draw(seed)
    hidden = torch.rand(rows, (size // patch) ** 2, generator=generator) < 0.5
    return {"pixel_values": random_pixels(generator, rows, size), "bool_masked_pos": hidden}


def transcribed_audio(seed, rows):
    """Audio with a few tokens that are said in it."""
    generator = draw(seed)
    return {
        "input_values": torch.randn(rows, SAMPLES, generator=generator),
        "labels": random_tokens(generator, rows, 6),
    }


def labelled_spectrograms(seed, rows):
    """A class for every spectrogram."""
    generator = draw(seed)
    return {
        "input_values": torch.randn(rows, FRAMES, MEL_BINS, generator=generator),
        "labels": torch.randint(CLASSES, (rows,), generator=generator),
    }


def transcribed_features(seed, rows, frames_last=False):
    """Spectrograms with what is said in them; frames come last, or before their features."""
    generator = draw(seed)
    features = torch.randn(rows, FRAMES, MEL_BINS, generator=generator)
    labels = random_tokens(generator, rows, 12)
    labels[::2, -2:] = -100
    return {"input_features": features.transpose(1, 2).contiguous() if frames_last else features, "labels": labels}


def contrasted_images(seed, rows, size=16):
    """Images and texts of which those in the same row belong together."""
    generator = draw(seed)
    ids = random_tokens(generator, rows, LENGTH - 4)
    ids[:, -1] = EOS
    return {"input_ids": ids, "pixel_values": random_pixels(generator, rows, size), "return_loss": True}


def described_images(seed, rows, size=16, places=4, type_of_images=None):
    """Images with texts in which ``places`` tokens stand for the image.

    Models that tell images from text by types of tokens, 0 and 1, need to know which the type of images is.
    """
    generator = draw(seed)
    ids = random_tokens(generator, rows, LENGTH + places)
    ids[:, 1 : 1 + places] = IMAGE
    labels = prompts_ignored(ids, generator).masked_fill(ids == IMAGE, -100)
    batch = {"input_ids": ids, "pixel_values": random_pixels(generator, rows, size), "labels": labels}
    if type_of_images is not None:
        batch["token_type_ids"] = ((ids == IMAGE) == bool(type_of_images)).long()
    return batch


def captioned_images(seed, rows, size=16):
    """Images with texts, without tokens that stand for the image."""
    return described_images(seed, rows, size, places=0)


def several_images(seed, rows, size=16, places=4):
    """The same as ``described_images`` where a row may have several images, here one."""
    batch = described_images(seed, rows, size, places)
    return {**batch, "pixel_values": batch["pixel_values"].unsqueeze(1)}


def patched_images(seed, rows, grid=4, patch=4, merged=2):
    """Images as a list of all their patches, for two frames each, as Qwen's models take them."""
    batch = described_images(seed, rows, places=(grid // merged) ** 2)
    batch["pixel_values"] = torch.randn(rows * grid * grid, 3 * 2 * patch * patch, generator=draw(seed + 1))
    batch["image_grid_thw"] = torch.tensor([[1, grid, grid]] * rows)
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).int()
    return batch


# Models


def turn_random_off(config):
    """Turns dropout and its like off in a configuration, and in those inside of it."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            turn_random_off(value)
        elif name == "apply_spec_augment":
            config.apply_spec_augment = False
        elif isinstance(value, float) and any(part in name for part in RANDOM):
            setattr(config, name, 0.0)


def build(model, settings):
    import transformers

    model = getattr(transformers, model)
    config = model.config_class(**copy.deepcopy(settings))  # which may change what it is given
    turn_random_off(config)
    return model(config)


def architectures(kind, batch, head, common, table):
    """Entries for a table of settings that each model has beside or instead of the common ones.

    The model's class is the name with the head, unless the settings have another one under "model"; so with "batch".
    """
    entries = {}
    for name, own in table.items():
        settings = {**common, **own}
        model = settings.pop("model", name + head)
        entries[name] = Architecture(kind, functools.partial(build, model, settings), settings.pop("batch", batch))
    return entries


# Settings that several models share. Dicts of dicts only keep the lines few.
SPECIAL = dict(vocab_size=VOCABULARY, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)
SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
LANGUAGE = dict(**SPECIAL, **SIZES, num_key_value_heads=2, max_position_embeddings=64)
GPT = dict(**SPECIAL, n_embd=32, n_layer=2, n_head=4, n_positions=64)
MIXTURE = dict(LANGUAGE, num_experts_per_tok=2, num_experts=4, num_local_experts=4, moe_intermediate_size=16)
LATENT = dict(
    **dict(num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8),
    **dict(v_head_dim=8, n_routed_experts=4, n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1),
)
STATES = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, pad_token_id=PAD, eos_token_id=EOS)
HEADS_OF_STATES = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=8)
ENCODER_DECODER = dict(
    **dict(SPECIAL, d_model=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=64),
    **dict(decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64, decoder_start_token_id=EOS),
)
T5 = dict(**SPECIAL, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=PAD)
IMAGES = dict(num_labels=CLASSES, image_size=16)
STAGES = dict(num_labels=CLASSES, hidden_sizes=[16, 32], depths=[1, 2])
WINDOWS = dict(IMAGES, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
AUDIO = dict(
    **dict(SPECIAL, **SIZES, conv_dim=[16, 16, 16], conv_kernel=[10, 3, 2], conv_stride=[10, 4, 2]),
    **dict(num_feat_extract_layers=3, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2),
    **dict(ctc_loss_reduction="mean", ctc_zero_infinity=True),
)
EYES = dict(**SIZES, image_size=16, patch_size=8)  # four patches
CLIP_EYES = dict(**EYES, model_type="clip_vision_model")
SIGLIP_EYES = dict(**EYES, model_type="siglip_vision_model")
SMALL_PATCHES = dict(EYES, patch_size=4)
LLAMA = dict(**LANGUAGE, model_type="llama")
QWEN = dict(**LANGUAGE, rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 1, 1]))
QWEN_EYES = dict(depth=2, num_heads=4, patch_size=4, hidden_size=32)

ARCHITECTURES: Dict[str, Architecture] = {
    **architectures(
        "dense",
        tokens,
        "ForCausalLM",
        LANGUAGE,
        {
            "Llama": {},
            "Qwen2": {},
            "Qwen3": dict(head_dim=8),
            "Mistral": dict(sliding_window=8),
            "Phi": {},
            "Phi3": {},
            "Gemma2": dict(head_dim=8, sliding_window=8),
            "Gemma3Text": dict(model="Gemma3ForCausalLM", head_dim=8, sliding_window=8),
            "Gemma3n": dict(
                **dict(layer_types=["sliding_attention", "full_attention"], sliding_window=8, head_dim=8),
                **dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCABULARY, laurel_rank=4),
                **dict(num_kv_shared_layers=0, activation_sparsity_pattern=[0.5, 0.0]),
            ),
            "Cohere": {},
            "Cohere2": dict(sliding_window=8),
            "StableLm": {},
            "Olmo2": {},
            "Olmo3": dict(sliding_window=8),
            "Glm4": dict(head_dim=8),
            "Granite": {},
            "SmolLM3": {},
            "Starcoder2": {},
            "Nemotron": {},
            "Helium": dict(head_dim=8),
            "Exaone4": dict(sliding_window=8),
            "DiffLlama": {},
            "ModernBertDecoder": dict(local_attention=8),
            "Falcon": {},
            "GPTNeoX": {},
            "Persimmon": {},
            "BioGpt": {},
            "OPT": dict(ffn_dim=64, word_embed_proj_dim=32),
            "XGLM": dict(ffn_dim=64, d_model=32, num_layers=2, attention_heads=4),
            "GPTNeo": dict(num_layers=2, num_heads=4, window_size=8, attention_types=[[["global", "local"], 1]]),
        },
    ),
    **architectures(
        "dense",
        tokens,
        "ForCausalLM",
        GPT,
        {
            "GPT2": dict(model="GPT2LMHeadModel"),
            "GPTBigCode": {},
            "GPTJ": dict(rotary_dim=4),
            "CodeGen": dict(rotary_dim=4, n_ctx=64),
            "Bloom": dict(hidden_size=32),
            "Mpt": dict(d_model=32, n_layers=2, n_heads=4, expansion_ratio=2, max_seq_len=64),
        },
    ),
    **architectures(
        "mixture of experts",
        tokens,
        "ForCausalLM",
        MIXTURE,
        {
            "Mixtral": {},
            "Qwen2Moe": dict(shared_expert_intermediate_size=32),
            "Qwen3Moe": dict(head_dim=8),
            "Olmoe": {},
            "FlexOlmo": {},
            "GptOss": dict(head_dim=8, sliding_window=8),
            "GraniteMoe": {},
            "JetMoe": dict(kv_channels=8, num_key_value_heads=2),
            "Ernie4_5_Moe": dict(moe_num_experts=4, moe_k=2),
            "DeepseekV2": LATENT,
            "DeepseekV3": LATENT,
            "Glm4Moe": dict(n_routed_experts=4, n_shared_experts=1, head_dim=8, first_k_dense_replace=1),
            "MiniMax": dict(head_dim=8, block_size=8),
            "Llama4Text": dict(
                model="Llama4ForCausalLM", head_dim=8, intermediate_size_mlp=64, attention_chunk_size=8
            ),
        },
    ),
    **architectures(
        "state space",
        tokens,
        "ForCausalLM",
        STATES,
        {
            "Mamba": dict(state_size=4),
            "FalconMamba": dict(state_size=4),
            "Mamba2": dict(state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=8),
            "Rwkv": dict(context_length=64),
        },
    ),
    **architectures(
        "hybrid",
        tokens,
        "ForCausalLM",
        LANGUAGE,
        {
            "Jamba": dict(
                **dict(num_experts=2, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2),
                **dict(mamba_d_state=4, mamba_dt_rank=2, use_mamba_kernels=False),
            ),
            "Bamba": dict(HEADS_OF_STATES, attn_layer_indices=[1]),
            "Zamba2": dict(
                **dict(num_hidden_layers=3, layers_block_type=["mamba", "hybrid", "mamba"], num_mem_blocks=1),
                **dict(mamba_d_state=8, mamba_headdim=8, mamba_ngroups=1, n_mamba_heads=8, chunk_size=8),
                **dict(num_key_value_heads=4, use_mamba_kernels=False),
            ),
            "FalconH1": dict(HEADS_OF_STATES, mamba_d_ssm=64, head_dim=8),
            "GraniteMoeHybrid": dict(
                **dict(HEADS_OF_STATES, layer_types=["mamba", "attention"], shared_intermediate_size=32),
                **dict(num_local_experts=4, num_experts_per_tok=2),
            ),
            "NemotronH": dict(
                **dict(
                    layers_block_type=["mamba", "attention", "moe"], head_dim=8, mamba_num_heads=8, mamba_head_dim=8
                ),
                **dict(ssm_state_size=8, n_groups=1, chunk_size=8, n_routed_experts=4, num_experts_per_tok=2),
                **dict(moe_intermediate_size=16, moe_shared_expert_intermediate_size=16),
            ),
            "Lfm2": dict(layer_types=["conv", "full_attention"], block_multiple_of=8),
            "RecurrentGemma": dict(num_hidden_layers=3, lru_width=32, attention_window_size=8, head_dim=8),
            "Qwen3Next": dict(
                **dict(layer_types=["linear_attention", "full_attention"], head_dim=8, linear_key_head_dim=8),
                **dict(linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, num_experts=4),
                **dict(num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16),
            ),
            "OlmoHybrid": dict(layer_types=["linear_attention", "full_attention"]),
        },
    ),
    **architectures(
        "encoder",
        masked_tokens,
        "ForMaskedLM",
        LANGUAGE,
        {
            "Bert": {},
            "Roberta": {},
            "XLMRoberta": {},
            "Electra": dict(embedding_size=16),
            "Albert": dict(embedding_size=16),
            "Deberta": dict(relative_attention=True, pos_att_type=["c2p", "p2c"]),
            "DebertaV2": dict(relative_attention=True, pos_att_type=["c2p", "p2c"]),
            "DistilBert": dict(dim=32, hidden_dim=64, n_layers=2, n_heads=4),
            "ModernBert": dict(local_attention=8, global_attn_every_n_layers=2, cls_token_id=BOS, sep_token_id=EOS),
            "MPNet": {},
            "RoFormer": dict(embedding_size=16),
            "ConvBert": dict(embedding_size=32),
            "MobileBert": dict(embedding_size=16, intra_bottleneck_size=16),
            "SqueezeBert": dict(embedding_size=32),
            "FNet": dict(batch=whole_masked_tokens),
            "Longformer": dict(attention_window=4),
            "BigBird": dict(attention_type="original_full"),
            "Esm": dict(mask_token_id=MASK, position_embedding_type="rotary"),
            "EuroBert": {},
            "NomicBert": {},
        },
    ),
    **architectures(
        "encoder",
        labelled_tokens,
        "ForSequenceClassification",
        dict(SPECIAL, num_labels=CLASSES),
        {
            "Funnel": dict(block_sizes=[1, 1], d_model=32, n_head=4, d_head=8, d_inner=64),
            "XLNet": dict(d_model=32, n_layer=2, n_head=4, d_inner=64),
            "XLM": dict(emb_dim=32, n_layers=2, n_heads=4, max_position_embeddings=64),
        },
    ),
    **architectures(
        "encoder-decoder",
        sequence_pairs,
        "ForConditionalGeneration",
        dict(ENCODER_DECODER, max_position_embeddings=64),
        {
            "Bart": {},
            "MBart": {},
            "Marian": dict(model="MarianMTModel", decoder_start_token_id=PAD),
            "Pegasus": dict(decoder_start_token_id=PAD),
            "PegasusX": dict(decoder_start_token_id=PAD, block_size=4, num_global_tokens=2),
            "M2M100": {},
            "Blenderbot": {},
            "NllbMoe": dict(num_experts=4, encoder_sparse_step=2, decoder_sparse_step=2, expert_capacity=64),
            "LED": dict(attention_window=4, max_encoder_position_embeddings=64, max_decoder_position_embeddings=64),
        },
    ),
    **architectures(
        "encoder-decoder",
        sequence_pairs,
        "ForConditionalGeneration",
        T5,
        {
            "T5": {},
            "UMT5": {},
            "LongT5": dict(local_radius=4),
            "SwitchTransformers": dict(
                **dict(num_decoder_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1),
                **dict(num_experts=2, expert_capacity=64),
            ),
        },
    ),
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

# At least one of each kind, quick to make and to compile.
IN_EVERY_RUN = (
    *("Qwen3", "GPT2", "GptOss", "Mamba2", "Lfm2", "ModernBert"),
    *("T5", "Dinov2", "ResNet", "Wav2Vec2", "CLIP", "Llava"),
)
