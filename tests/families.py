"""The tested model families, with their rewritten attentions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers

WINDOW = 24  # smaller than every test's prompt, so that sliding layers really slide


@dataclass(frozen=True)
class Family:
    """A tiny random model of one family. `rewritten` and `exact` count its attentions; `lanes` are those of decode;
    `reason` is in the warning about the exact ones. `absorbed` counts latent attentions over Hugging Face's cache."""

    name: str
    config: str
    settings: dict[str, Any] = field(default_factory=dict)
    rewritten: int = 2
    exact: int = 0
    lanes: int = 2
    note: str = ""
    reason: str = "sliding window"
    absorbed: int = 0

    @property
    def one_layer(self) -> Family:
        """Return a family with only the first layer, if all layers are equal."""
        if max(self.rewritten, self.absorbed) < 2 or "layer_types" in self.settings:
            return self
        rewritten, absorbed = min(1, self.rewritten), min(1, self.absorbed)
        return replace(self, settings={**self.settings, "num_hidden_layers": 1}, rewritten=rewritten, absorbed=absorbed)

    def model(self) -> Any:
        """Return the model in float32, which never stops early, with random biases and norms, and weights so large that
        logits differ clearly."""
        torch.manual_seed(0)
        settings = {name: value for name, value in {**COMMON, **self.settings}.items() if value is not LEFT_OUT}
        config = getattr(transformers, self.config)(**settings)
        for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, token, None)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for vector in (parameter for parameter in model.parameters() if parameter.dim() == 1):
                vector += 0.2 * torch.randn_like(vector)
        return model


LEFT_OUT = object()  # in place of a setting that a config computes itself
COMMON = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024, "initializer_range": 0.2,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + i / 10 for i in range(8)],
    "long_factor": [4.0 + i for i in range(8)], "original_max_position_embeddings": 128, "factor": 8.0,
}  # fmt: skip
# Its frequencies change above the model's length (144 tokens below), which only tests that compare caches may exceed.
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
DYNAMIC = {"rope_parameters": DYNAMIC_ROPE, "max_position_embeddings": 144}
GRANITE = {"attention_multiplier": 0.15, "embedding_multiplier": 2.0, "residual_multiplier": 0.7, "logits_scaling": 1.5}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GROUPED_EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 0, "n_shared_experts": 1,
}  # fmt: skip
ALTERNATE = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
SLIDING = "sliding-window layers stay exact"
# Every other layer has a state of fixed size instead of a cache, and no attention.
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
SHARED_EXPERT = {**EXPERTS, "shared_expert_intermediate_size": 32}
MAMBA = {
    "mamba_d_state": 16, "mamba_d_head": 16, "mamba_n_heads": 8, "mamba_expand": 2, "mamba_d_ssm": 128,
    "mamba_n_groups": 1, "mamba_chunk_size": 16,
}  # fmt: skip
GRANITE_HYBRID = {**EXPERTS, **MAMBA, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 32}
CONVOLUTION = {"layer_types": ["conv", "full_attention"]}
MINIMAX = {**EXPERTS, "layer_types": ["full_attention", "linear_attention"], "block_size": 16}
ROBERTA = {"is_decoder": True, "type_vocab_size": 1}
ZAMBA = {
    "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "attention_head_dim": 32,
    "attention_hidden_size": 128, "adapter_rank": 8, "mamba_d_state": 16, "mamba_headdim": 16, "n_mamba_heads": 8,
    "mamba_ngroups": 1, "chunk_size": 16,
}  # fmt: skip
NEMOTRON = {
    "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16,
    "n_groups": 1, "chunk_size": 16,
}  # fmt: skip
GEMMA4 = {
    **ALTERNATE, "global_head_dim": 16, "num_global_key_value_heads": 2, "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0,
}  # fmt: skip
LLAMA4 = {
    **EXPERTS, "intermediate_size_mlp": 96, "layer_types": ["full_attention"] * 2, "no_rope_layers": [0, 0],
    "interleave_moe_layer_step": 2,
}  # fmt: skip
JAMBA = {
    "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "mamba_d_state": 4, "mamba_dt_rank": 4,
    "head_dim": LEFT_OUT,
}  # fmt: skip
# Each step of the uncompiled model projects its whole cache of latents to keys and values.
LATENT = {
    **GROUPED_EXPERTS, "num_key_value_heads": 4, "head_dim": LEFT_OUT, "first_k_dense_replace": 1, "q_lora_rank": 24,
    "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 24,
}  # fmt: skip
KIMI = {"layer_types": ["linear_attention", "full_attention"]}
INDEXER = {"index_topk": 16, "index_head_dim": 16, "index_n_heads": 2}
LATENTS = "latent attention: exact, over Hugging Face's own cache"


def latent(name: str, config: str, settings: dict[str, Any] = LATENT, absorbed: int = 2, note: str = LATENTS) -> Family:
    return Family(name, config, settings, rewritten=0, note=note, absorbed=absorbed)


HYBRID = "hybrid: one layer of two has attention"
NO_POSITIONS = HYBRID + ", without positions"

FAMILIES = (
    Family("llama 2", "LlamaConfig", {"num_key_value_heads": 4}),
    Family("llama 3", "LlamaConfig", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    Family("llama 3.x", "LlamaConfig", {"rope_parameters": LLAMA3_ROPE}, note="llama3 rope scaling"),
    Family("llama, dynamic rope", "LlamaConfig", DYNAMIC, lanes=1, note="its rotary table is a graph break"),
    Family("llama, eager attention", "LlamaConfig", {"attn_implementation": "eager"}),
    Family("mistral", "MistralConfig", {"sliding_window": None}, note="v0.2 and later"),
    Family("mistral, sliding", "MistralConfig", {"sliding_window": WINDOW}, 0, 2, 1, "v0.1: " + SLIDING),
    Family("mixtral", "MixtralConfig", {**EXPERTS, "sliding_window": None}),
    Family("qwen2", "Qwen2Config"),
    Family("qwen2_moe", "Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 32}),
    Family("qwen3", "Qwen3Config"),
    Family("qwen3_moe", "Qwen3MoeConfig", EXPERTS),
    Family("gemma", "GemmaConfig"),
    Family("gemma2", "Gemma2Config", {**ALTERNATE, "attn_logit_softcapping": 2.0}, 1, 1, 1, note="softcap; " + SLIDING),
    Family("gemma3_text", "Gemma3TextConfig", ALTERNATE, 1, 1, 1, note=SLIDING),
    Family("phi", "PhiConfig"),
    Family("phi3", "Phi3Config"),
    Family("phi3, longrope", "Phi3Config", {"rope_parameters": LONG_ROPE}, lanes=1, note="128k"),
    Family("granite", "GraniteConfig", GRANITE),
    Family("olmo2", "Olmo2Config"),
    Family("cohere", "CohereConfig", {"logit_scale": 1.0}),
    Family("cohere2", "Cohere2Config", {**ALTERNATE, "logit_scale": 1.0}, 1, 1, 1, note=SLIDING),
    Family("starcoder2", "Starcoder2Config", {"sliding_window": None}),
    Family("stablelm", "StableLmConfig"),
    Family("smollm3", "SmolLM3Config", {"no_rope_layers": [1, 0]}, note="one layer without positions"),
    Family("glm4", "Glm4Config"),
    Family("glm4_moe", "Glm4MoeConfig", GROUPED_EXPERTS, note="its router scatters in place"),
    Family("dots1", "Dots1Config", GROUPED_EXPERTS, note="its router scatters in place"),
    Family("exaone4", "Exaone4Config", ALTERNATE, 1, 1, 1, note=SLIDING),
    Family("seed_oss", "SeedOssConfig"),
    Family("ernie4_5", "Ernie4_5Config"),
    Family("arcee", "ArceeConfig"),
    Family("gpt_neox", "GPTNeoXConfig"),
    Family("opt", "OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    Family("gpt_oss", "GptOssConfig", {**EXPERTS, **ALTERNATE}, 1, 1, 1, note="sinks; " + SLIDING),
    Family("olmo", "OlmoConfig"),
    Family("olmo3", "Olmo3Config", ALTERNATE, 1, 1, 1, note=SLIDING),
    Family("olmoe", "OlmoeConfig", EXPERTS),
    Family("granitemoe", "GraniteMoeConfig", {**EXPERTS, **GRANITE}),
    Family("hunyuan_v1_dense", "HunYuanDenseV1Config"),
    Family("hunyuan_v1_moe", "HunYuanMoEV1Config", {**EXPERTS, "moe_topk": 2}),
    Family("minimax_m2", "MiniMaxM2Config", EXPERTS),
    Family("gemma4_text", "Gemma4TextConfig", GEMMA4, 1, 1, 1, note=SLIDING),
    Family("gpt_bigcode", "GPTBigCodeConfig", {"n_inner": 96}, note="one KV head"),
    Family("biogpt", "BioGptConfig"),
    Family("gptj", "GPTJConfig", {"rotary_dim": 8}, lanes=1),
    Family("roberta", "RobertaConfig", ROBERTA, note="token types gathered by positions"),
    Family("codegen", "CodeGenConfig", {"rotary_dim": 8}, lanes=1, note="its mask is scaled with its scores"),
    Family("falcon, alibi", "FalconConfig", {"alibi": True, "head_dim": LEFT_OUT}, lanes=1),
    Family("llama4_text", "Llama4TextConfig", LLAMA4, lanes=1),
    latent("deepseek_v2", "DeepseekV2Config", {**LATENT, "q_lora_rank": None}),
    latent("deepseek_v3", "DeepseekV3Config"),
    latent("minicpm3", "MiniCPM3Config"),
    latent("glm4_moe_lite", "Glm4MoeLiteConfig"),
    latent("youtu", "YoutuConfig"),
    latent("axk1", "AXK1Config"),
    latent("kimi_linear", "KimiLinearConfig", {**LATENT, **KIMI}, 1, f"hybrid; {LATENTS}"),
    latent("deepseek_v32", "DeepseekV32Config", {**LATENT, **INDEXER}, note=f"an indexer; {LATENTS}"),
    Family("qwen3_5_text", "Qwen3_5TextConfig", LINEAR, 1, lanes=1, note=HYBRID),
    Family("qwen3_5_moe_text", "Qwen3_5MoeTextConfig", {**LINEAR, **SHARED_EXPERT}, 1, lanes=1, note=HYBRID),
    Family("qwen3_next", "Qwen3NextConfig", {**LINEAR, **SHARED_EXPERT}, 1, lanes=1, note=HYBRID),
    Family("olmo_hybrid", "OlmoHybridConfig", LINEAR, 1, lanes=1, note=HYBRID),
    Family("lfm2", "Lfm2Config", CONVOLUTION, 1, lanes=1, note=HYBRID),
    Family("falcon_h1", "FalconH1Config", MAMBA, lanes=1, note="hybrid: each layer has both"),
    Family("zamba2", "Zamba2Config", ZAMBA, 1, lanes=1, note=NO_POSITIONS),
    Family("granitemoehybrid", "GraniteMoeHybridConfig", GRANITE_HYBRID, 1, lanes=1, note=NO_POSITIONS),
    Family("nemotron_h", "NemotronHConfig", NEMOTRON, 1, lanes=1, note=NO_POSITIONS),
    Family("jamba", "JambaConfig", JAMBA, 1, lanes=1, note=NO_POSITIONS),
    Family("bamba", "BambaConfig", {**MAMBA, "attn_layer_indices": [1], "head_dim": LEFT_OUT}, 1, lanes=1, note=HYBRID),
    Family("lfm2_moe", "Lfm2MoeConfig", {**EXPERTS, **CONVOLUTION, "num_dense_layers": 1}, 1, lanes=1, note=HYBRID),
    Family("minimax", "MiniMaxConfig", MINIMAX, 1, note=HYBRID + "; its cache is of a class of its own"),
)
BY_NAME = {family.name: family for family in FAMILIES}
