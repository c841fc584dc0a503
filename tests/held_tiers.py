"""What the tiers of a session hold of its cached tokens, for tests that compare it bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from specache_compile.runtime.session import session_of


def held(session: Any) -> list[dict[str, Tensor]]:
    """Layer by layer, host, low-bit and recent tier; of the slots, the pairs beside those of the host."""
    length, low_bit = session.length, session.options.low_bit_length(session.length)
    session.drain()
    layers = []
    for state in session.state:
        recent = torch.arange(low_bit, length) % state["recent"].shape[2]
        index = state["slot_index"].long()
        there = (index >= 0)[:, :, :, None, None]
        pairs = state["host"].gather(2, index.clamp(min=0)[:, :, :, None, None].expand_as(state["slots"]))
        assert (index < low_bit).all()
        assert torch.equal(state["slots"].where(there, 0), pairs.where(there, 0))
        layers.append(
            {
                "host": state["host"][:, :, :length], "codes": state["codes"][:, :, :low_bit],
                "keys": state["key_params"][:, :, : low_bit // session.options.group_size],
                "values": state["value_params"][:, :, :low_bit], "recent": state["recent"][:, :, recent],
            }
        )  # fmt: skip
    return [{name: tensor.clone() for name, tensor in layer.items()} for layer in layers]


def at_hand(cache: DynamicCache) -> Any:
    """A cache's session, brought to the tokens that the cache shows."""
    session: Any = session_of(cache)
    keys: Any = cache.layers[0].keys
    session.replay(keys.handle.version, keys.handle.edits)
    return session


def differences(some: Any, others: Any) -> list[tuple[int, str]]:
    """Layers and tiers that are not bit for bit equal."""
    pairs = enumerate(zip(some, others, strict=True))
    return [(layer, name) for layer, (a, b) in pairs for name in a if not torch.equal(a[name], b[name])]
