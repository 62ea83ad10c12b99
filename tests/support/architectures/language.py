# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Models of language: dense ones, mixtures of experts, state spaces, hybrids, encoders and encoder-decoders."""

from typing import Dict

from support.architectures.batches import (
    BOS,
    CLASSES,
    EOS,
    MASK,
    PAD,
    VOCABULARY,
    labelled_tokens,
    masked_tokens,
    sequence_pairs,
    tokens,
    whole_masked_tokens,
)
from support.architectures.entries import ENCODER_DECODER, LANGUAGE, SPECIAL, Architecture, architectures

GPT = dict(**SPECIAL, n_embd=32, n_layer=2, n_head=4, n_positions=64)
MIXTURE = dict(LANGUAGE, num_experts_per_tok=2, num_experts=4, num_local_experts=4, moe_intermediate_size=16)
LATENT = dict(
    **dict(num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8),
    **dict(v_head_dim=8, n_routed_experts=4, n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1),
)
STATES = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, pad_token_id=PAD, eos_token_id=EOS)
HEADS_OF_STATES = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=8)
T5 = dict(**SPECIAL, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=PAD)

LANGUAGE_MODELS: Dict[str, Architecture] = {
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
}
