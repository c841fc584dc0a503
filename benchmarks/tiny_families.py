"""A tiny random model of each causal LM of transformers, from its config with small sizes."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

WINDOW = 24  # smaller than the prompt, so that sliding layers really slide
# A setting is given where a config has one of its name. Linear layers of 64, heads of 16, four experts of which two.
SMALL: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 1024, "initializer_range": 0.2, "init_std": 0.2,
    "tie_word_embeddings": False, "pad_token_id": None, "is_decoder": True, "sliding_window": WINDOW,
    "ffn_dim": 96, "n_inner": 96, "embedding_size": 64, "word_embed_proj_dim": 64, "rotary_dim": 8,
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
    # experts
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_group": 2, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "intermediate_size_mlp": 96, "shared_intermediate_size": 32,
    # latents
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "qk_head_dim": 32, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 1024,
    # states in place of caches
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "mamba_d_state": 16, "mamba_d_head": 16, "mamba_n_heads": 8, "mamba_expand": 2, "mamba_d_ssm": 128,
    "mamba_n_groups": 1, "mamba_chunk_size": 16, "mamba_headdim": 16, "n_mamba_heads": 8, "mamba_ngroups": 1,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16,
    "mamba_dt_rank": 8, "time_step_rank": 8, "lru_width": 64, "attention_window_size": WINDOW,
    # embeddings beside the layers
    "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16,
}  # fmt: skip
# Those of a family that its config's own names and the ones above do not make small or consistent; None: left out.
SET_LATER = ("head_dim", "num_key_value_heads")  # None where a config says none, and its model computes them
LEFT_OUT = object()
TWO_KINDS = ["linear_attention", "full_attention"]
GLOBAL_HEADS = {"global_head_dim": 16, "num_global_key_value_heads": 2, "num_kv_shared_layers": 0}
UNPADDED = {"pad_token_id": 0}
EXPERTS = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": TWO_KINDS},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "gemma4_text": GLOBAL_HEADS,
    "gemma4": {"text_config": {**GLOBAL_HEADS, **UNPADDED}},
    "gemma4_unified_text": GLOBAL_HEADS,
    "gemma4_unified": {"text_config": {**GLOBAL_HEADS, **UNPADDED}},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "emu3": UNPADDED,
    "modernbert-decoder": UNPADDED,
    "mllama": UNPADDED,
    "dots1": EXPERTS,
    "deepseek_v2": {**EXPERTS, "topk_method": "greedy"},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "prophetnet": {"num_hidden_layers": LEFT_OUT, "num_encoder_layers": 2, "num_decoder_layers": 2},
    "xlnet": {"d_head": 16},
    "xmod": {"default_language": "en_XX"},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "reformer": {"axial_pos_embds": False, "pad_token_id": 0},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
    "dbrx": {"attn_config": LEFT_OUT, "ffn_config": LEFT_OUT},
}


def families() -> dict[str, str]:
    """The model type that stands for each class of causal LMs, and the class: the type whose config the class takes, or
    the first that the class is listed for."""
    found: dict[str, str] = {}
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if name not in found or config_class(name).model_type == model_type:
            found[name] = model_type
    return {model_type: name for name, model_type in sorted(found.items(), key=lambda pair: pair[1])}


def config_class(name: str) -> Any:
    return getattr(transformers, name).config_class


def small(config: Any, own: dict[str, Any]) -> dict[str, Any]:
    """Settings that make a config of the same class small: `own` settings, and the settings above that it has.

    Lists with an entry per layer keep the entries of the first layer of each kind.
    """
    layers = getattr(config, "num_hidden_layers", None)
    kept = kinds(config, layers) if isinstance(layers, int) else []
    settings: dict[str, Any] = {"num_hidden_layers": len(kept)} if kept else {}
    for name, value in vars(config).items():
        if isinstance(value, transformers.PreTrainedConfig) and own.get(name) is not LEFT_OUT:
            settings[name] = type(value)(**small(value, own.get(name, {})))
        elif isinstance(value, list) and kept and len(value) == layers:
            settings[name] = [value[i] for i in kept]
    known = {name: value for name, value in SMALL.items() if is_set(config, name)}
    if "kv_lora_rank" in known:
        known["num_key_value_heads"] = SMALL["num_attention_heads"]
    settings = {**settings, **known, **{n: v for n, v in own.items() if not isinstance(v, dict) or n not in settings}}
    return {name: value for name, value in settings.items() if value is not LEFT_OUT}


def is_set(config: Any, name: str) -> bool:
    """Whether a config has a setting of this name, or of the name that it is an alias of."""
    known = {**vars(config), **{other: vars(config).get(own) for other, own in config.attribute_map.items()}}
    return name in known and (known[name] is not None or name in SET_LATER)


def kinds(config: Any, layers: int) -> list[int]:
    """The first layer of each kind that a config lists; the first two where all are alike."""
    listed = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    first = [listed.index(kind) for kind in dict.fromkeys(listed)] if len(listed) == layers else []
    return sorted(first) if len(first) > 1 else list(range(min(2, layers)))


def tiny(model_type: str, name: str) -> Any:
    """A family's model, of the class `name`, in float32, never stopping early; weights large enough that logits are
    well apart, biases and norms random too."""
    torch.manual_seed(0)
    own = OWN.get(model_type, {})
    config = config_class(name)(**small(config_class(name)(), own))
    model = getattr(transformers, name)(config).float().eval()
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.generation_config, token, None)
    with torch.no_grad():
        for vector in (parameter for parameter in model.parameters() if parameter.dim() == 1):
            vector += 0.2 * torch.randn_like(vector)
    return model
