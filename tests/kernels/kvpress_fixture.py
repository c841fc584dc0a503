"""Record the pairs that kvpress keeps of a prompt: by Expected Attention, with queries and pairs, and by KVzip.

    python tests/kernels/kvpress_fixture.py    writes kvpress.safetensors and kvzip.safetensors next to this file

It needs a separate environment: pip install kvpress==0.5.5 safetensors. Two layers of a random Llama with one row.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from kvpress import ExpectedAttentionPress, KVzipPress
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from specache_compile.compat import with_cache

TOKENS, KEPT = 96, 24


@torch.no_grad()
def expected_attention() -> None:
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
    model(ids, **with_cache(whole))
    cosine, sine = model.model.rotary_emb(queries[0], torch.arange(TOKENS)[None])
    for hook in hooks:
        hook.remove()
    press = ExpectedAttentionPress(compression_ratio=1 - KEPT / TOKENS)
    with press(model):
        model(ids, **with_cache(pressed))
    for number, (full, rest) in enumerate(zip(whole.layers, pressed.layers, strict=True)):
        turned, _ = apply_rotary_pos_emb(queries[number], queries[number], cosine, sine)
        same = (rest.keys[:, :, :, None] == full.keys[:, :, None]).all(-1)  # [1, H, kept, n]
        assert bool((same.sum(-1) == 1).all())
        kept = same.int().argmax(-1).sort(-1).values
        found |= {f"q{number}": turned, f"k{number}": full.keys, f"v{number}": full.values, f"kept{number}": kept}
    save_file({name: x.contiguous() for name, x in found.items()}, Path(__file__).with_name("kvpress.safetensors"))


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per letter; user messages are between < and >."""
    tokenizer = Tokenizer(WordLevel({chr(number): number for number in range(128)}, unk_token="?"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    template = "<{% for message in messages %}{{ message['content'] }}{% endfor %}>"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)


@torch.no_grad()
def kvzip() -> None:
    """Record KVzip for a context of two chunks after the template's first token."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 32}
    config = LlamaConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.4
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.cat([torch.tensor([[ord("<")]]), torch.randint(32, 127, (1, 59))], 1)
    with tempfile.TemporaryDirectory() as folder:
        letters().save_pretrained(folder)
        model.config.name_or_path = folder
        with KVzipPress(compression_ratio=0.7, chunk_size=32)(model):
            model.model(input_ids=ids, **with_cache(DynamicCache()))
    stays = torch.ones(2, 1, 2, ids.shape[1], dtype=torch.uint8)
    for number, layer in enumerate(model.model.layers):
        stays[number][layer.self_attn.masked_key_indices] = 0
    found = {f"model:{name}": x for name, x in model.state_dict().items()}
    found |= {name: torch.tensor(size) for name, size in sizes.items()} | {"ids": ids, "stays": stays}
    save_file({name: x.contiguous() for name, x in found.items()}, Path(__file__).with_name("kvzip.safetensors"))


if __name__ == "__main__":
    expected_attention()
    kvzip()
