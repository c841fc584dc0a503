"""LoRA adapters with PEFT's attributes, for tests without PEFT."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, ModuleDict


class Adapted(torch.nn.Module):
    """A linear layer with the adapters "one" and "two", of which "one" is active."""

    def __init__(self, base_layer: Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = ModuleDict({name: Linear(base_layer.in_features, 4, bias=False) for name in ("one", "two")})
        self.lora_B = ModuleDict({name: Linear(4, base_layer.out_features, bias=False) for name in ("one", "two")})
        self.scaling = {"one": 2.0, "two": 2.0}
        self.merged_adapters: list[str] = []
        self._disable_adapters = False
        self.set_adapter("one")

    def set_adapter(self, name: str) -> None:
        self._active_adapter = [name]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x)
        for name in [] if self._disable_adapters else self._active_adapter:
            result = result + self.lora_B[name](self.lora_A[name](x)) * self.scaling[name]
        return result


def adapt(model: Any) -> Any:
    """Return the same model with random adapters on its keys and values."""
    torch.manual_seed(1)
    for layer in model.model.layers:
        layer.self_attn.k_proj = Adapted(layer.self_attn.k_proj)
        layer.self_attn.v_proj = Adapted(layer.self_attn.v_proj)
    return model.eval()
