"""One rank of a tensor-parallel model as a separate model with fewer heads, channels and vocabulary entries."""

from __future__ import annotations

import copy
from typing import Any

from specache_compile.errors import SpecacheError, split_heads

# The fields of a config that Hugging Face's plans split.
SPLIT = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size", "vocab_size")


def one_of(config: Any, ranks: int) -> Any:
    """The config of one of `ranks` equal parts of a decoder. SpecacheError where they would not be equal."""
    if ranks < 1:
        raise SpecacheError(f"ranks={ranks}: give a whole number, 1 or more")
    if ranks == 1:
        return config
    part = copy.deepcopy(config)
    text = part.get_text_config()
    plan = getattr(text, "base_model_tp_plan", None) or {}
    if plan and not any(style == "colwise" for name, style in plan.items() if "attn" in name or "attention" in name):
        raise SpecacheError(
            f"ranks: {type(text).__name__} has a tp_plan that leaves attention whole: each rank holds every "
            "head's pairs: explain it without ranks"
        )
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if kv_heads % ranks or heads % ranks:
        raise split_heads(kv_heads, ranks)
    text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    for name in SPLIT:
        whole = getattr(text, name, None)
        if whole is not None:
            setattr(text, name, -(-whole // ranks))
    text.pad_token_id = None  # it is a row of the whole table
    return part


def check_part(config: Any, part: Any, head_dim: int) -> None:
    """SpecacheError where a model of a rank's config has other heads than the whole model's."""
    if part is config:
        return
    text = config.get_text_config()
    whole = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if head_dim != whole:
        raise SpecacheError(f"ranks: {type(config).__name__} does not say how wide a head is, nor a rank's part")
