"""Backbones of keras-hub that read text: the arguments of small ones."""

from typing import Any

STEPS, VOCABULARY = 8, 31

# Arguments that many of them have.
BERT = {
    "vocabulary_size": VOCABULARY,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 8,
    "intermediate_dim": 16,
}
_LENGTH = {"max_sequence_length": STEPS}
_NO_DROPOUT = {"dropout": 0.0}
DECODER = {
    "vocabulary_size": VOCABULARY,
    "num_layers": 2,
    "num_query_heads": 2,
    "num_key_value_heads": 1,
    "hidden_dim": 8,
    "intermediate_dim": 16,
}
_EXPERTS = {"num_experts": 4, "top_k": 2}
_LINEAR_ATTENTION = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 4,
}
_T5GEMMA = {
    "vocabulary_size": VOCABULARY,
    **{
        f"{part}_{name}": value
        for part in ("encoder", "decoder")
        for name, value in {
            "hidden_dim": 8,
            "intermediate_dim": 16,
            "num_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        }.items()
    },
    "dropout_rate": 0.0,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 1.0,
    "attention_bias": False,
    "hidden_activation": "gelu_approximate",
    "sliding_window": 4,
    "attn_logit_softcapping": 50.0,
    "cross_attention_hidden_size": 8,
}

SMALL: dict[str, Any] = {
    "GPT2": BERT | _LENGTH | _NO_DROPOUT,
    "Bert": BERT | _LENGTH | _NO_DROPOUT,
    "Llama": DECODER,
    "Albert": BERT | _LENGTH | {"embedding_dim": 4, "dropout": 0.0},
    "Bart": BERT | _LENGTH | _NO_DROPOUT,
    "Bloom": BERT | _NO_DROPOUT,
    "DebertaV3": BERT | _LENGTH | {"bucket_size": 4, "dropout": 0.0},
    "DistilBert": BERT | _LENGTH | _NO_DROPOUT,
    "ESM": BERT | {"max_wavelength": 100, "dropout": 0.0, "pad_token_id": 0},
    "EdRec": {
        "vocab_size": VOCABULARY,
        "num_layers_enc": 2,
        "num_layers_dec": 2,
        "num_heads": 2,
        "hidden_dim": 8,
        "intermediate_dim": 16,
        "dropout": 0.0,
    },
    "Electra": {
        "vocab_size": VOCABULARY,
        **{name: size for name, size in BERT.items() if name != "vocabulary_size"},
        **_LENGTH,
        "embedding_dim": 4,
        "dropout": 0.0,
    },
    "FNet": {
        "vocabulary_size": VOCABULARY,
        "num_layers": 2,
        "hidden_dim": 8,
        "intermediate_dim": 16,
        "dropout": 0.0,
        **_LENGTH,
    },
    "Falcon": {
        "vocabulary_size": VOCABULARY,
        "num_layers": 2,
        "num_attention_heads": 2,
        "hidden_dim": 8,
        "intermediate_dim": 16,
        "attention_dropout_rate": 0.0,
        "feedforward_dropout_rate": 0.0,
    },
    "GPTNeoX": BERT | {"hidden_dim": 16, "max_sequence_length": STEPS, "dropout": 0.0},
    "Gemma": DECODER | {"head_dim": 4},
    "GptOss": DECODER | _EXPERTS | {"sliding_window": 2},
    "Llama3": DECODER,
    "Mistral": DECODER,
    "Mixtral": DECODER | _EXPERTS | {"sliding_window": 2},
    "OPT": BERT | _LENGTH | _NO_DROPOUT,
    "Phi3": DECODER,
    "Qwen": DECODER,
    "Qwen3": DECODER | {"head_dim": 4},
    "Qwen3Moe": DECODER | _EXPERTS | {"head_dim": 4, "moe_intermediate_dim": 8},
    "Qwen3_5": DECODER | _LINEAR_ATTENTION,
    "Qwen3_5Moe": {
        **{k: v for k, v in DECODER.items() if k != "intermediate_dim"},
        **_LINEAR_ATTENTION,
        **_EXPERTS,
        "moe_intermediate_dim": 8,
        "shared_expert_intermediate_size": 8,
    },
    "QwenMoe": DECODER
    | _EXPERTS
    | {"moe_intermediate_dim": 8, "shared_expert_intermediate_dim": 16},
    "RWKV7": {
        "vocabulary_size": VOCABULARY,
        "hidden_size": 8,
        "num_layers": 2,
        "head_size": 4,
        "intermediate_dim": 16,
        "gate_lora": 4,
        "mv_lora": 4,
        "aaa_lora": 4,
        "decay_lora": 4,
    },
    "Roberta": BERT | _LENGTH | _NO_DROPOUT,
    "RoformerV2": BERT | {"head_size": 4, "max_wavelength": 100, "dropout": 0.0},
    "SmolLM3": {
        "vocabulary_size": VOCABULARY,
        "hidden_dim": 8,
        "intermediate_dim": 16,
        "num_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_layer_enabled_list": [True, False],
        "layer_types": ["attention", "attention"],
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 16,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
    },
    "T5": BERT | _NO_DROPOUT,
    "T5Gemma": _T5GEMMA,
    "T5Gemma2": _T5GEMMA | {"use_query_key_norm": True},
    "XLMRoberta": BERT | _LENGTH | _NO_DROPOUT,
    "XLNet": BERT | _NO_DROPOUT,
}
