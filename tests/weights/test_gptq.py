"""GPTQ's weights, as gptqmodel reads them on a CPU. By hand: it asks for newer versions of others than are tested here.

pip install --no-deps gptqmodel optimum device-smi tokenicer logbar defuser pypcre threadpoolctl
python -m pytest -m slow tests/weights/test_gptq.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaForCausalLM

from conftest import LOSSLESS, greedy, is_held, prompt, tiny_llama
from specache_compile.compat import with_cache

pytestmark = pytest.mark.slow

BITS, GROUP = 4, 32
PER_WORD = 32 // BITS


def in_words(codes: Tensor) -> Tensor:
    """Codes [n · 8, m] as int32 [n, m], the first lowest."""
    words = sum(codes[place::PER_WORD].long() << BITS * place for place in range(PER_WORD))
    return words.to(torch.int32).contiguous()  # type: ignore[union-attr]


def packed(weight: Tensor) -> dict[str, Tensor]:
    """A weight [outputs, inputs] as a GPTQ checkpoint has it: symmetric, each group rounded to its nearest levels."""
    groups = weight.unflatten(1, (-1, GROUP))
    scales = groups.abs().amax(2) / 7
    codes = ((groups / scales.unsqueeze(2)).round() + 8).clamp(0, 15).flatten(1).t()
    zeros = torch.full((weight.shape[0], scales.shape[1]), 7)  # one less than they are
    return {
        "qweight": in_words(codes.int()), "scales": scales.t().contiguous(), "qzeros": in_words(zeros).t().contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }  # fmt: skip


def checkpoint(model: LlamaForCausalLM, folder: Path) -> Path:
    """The model with its linear layers but the last packed."""
    tensors = {}
    for name, weight in model.state_dict().items():
        parts = packed(weight) if name.endswith("proj.weight") else {"weight": weight}
        tensors |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = {"quant_method": "gptq", "bits": BITS, "group_size": GROUP, "desc_act": False, "sym": True}
    quantization["checkpoint_format"] = "gptq"
    (folder / "config.json").write_text(
        json.dumps({**model.config.to_dict(), "quantization_config": quantization}, default=str)
    )
    return folder


@torch.no_grad()
def test_tokens_equal_the_uncompiled_quantised_models(tmp_path: Path) -> None:
    pytest.importorskip("gptqmodel")
    whole, ids, cache = tiny_llama(), prompt(90), DynamicCache()
    folder = checkpoint(whole, tmp_path)
    plain, model = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu") for _ in range(2)
    )
    assert not torch.allclose(plain(ids).logits, whole(ids).logits, atol=1e-3), "the weights must have changed"
    model.compile(backend="specache", options=LOSSLESS)
    assert torch.equal(greedy(model, ids, 12, **with_cache(cache)), greedy(plain, ids, 12))
    assert is_held(cache)
