"""What kvpress keeps of a prompt by Expected Attention, and the queries and pairs that it chose from.

    python tests/kernels/kvpress_fixture.py    writes kvpress.safetensors beside this file

In an environment of its own: pip install kvpress==0.5.5 safetensors. Two layers of a random Llama with one row.
"""

from __future__ import annotations

from pathlib import Path

import torch
from kvpress import ExpectedAttentionPress
from safetensors.torch import save_file
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

TOKENS, KEPT = 96, 24


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.4,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids, found = torch.randint(0, 64, (1, TOKENS)), {"frequencies": model.model.rotary_emb.inv_freq}
    queries: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(
            lambda module, given, out: queries.append(out.view(1, TOKENS, 4, 16).transpose(1, 2))
        )
        for layer in model.model.layers
    ]
    whole, pressed = DynamicCache(), DynamicCache()
    model(ids, past_key_values=whole)
    cosine, sine = model.model.rotary_emb(queries[0], torch.arange(TOKENS)[None])
    for hook in hooks:
        hook.remove()
    press = ExpectedAttentionPress(compression_ratio=1 - KEPT / TOKENS)
    with press(model):
        model(ids, past_key_values=pressed)
    for number, (full, rest) in enumerate(zip(whole.layers, pressed.layers, strict=True)):
        turned, _ = apply_rotary_pos_emb(queries[number], queries[number], cosine, sine)
        same = (rest.keys[:, :, :, None] == full.keys[:, :, None]).all(-1)  # [1, H, kept, n]
        assert bool((same.sum(-1) == 1).all())
        kept = same.int().argmax(-1).sort(-1).values
        found |= {f"q{number}": turned, f"k{number}": full.keys, f"v{number}": full.values, f"kept{number}": kept}
    save_file({name: x.contiguous() for name, x in found.items()}, Path(__file__).with_name("kvpress.safetensors"))


if __name__ == "__main__":
    main()
