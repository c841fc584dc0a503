"""Maps a GGUF file's metadata into the model's configuration, or rejects the file with the key's name.

transformers maps some of a file's keys `ARCH.*` and silently ignores the others. This is an allow list: an ignored key
must have the value that the configuration has anyway, or no influence on the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specache_compile.errors import SpecacheError

# Keys without influence on what the model computes.
WITHOUT_INFLUENCE = {"context_length", "pooling_type", "rope.scaling.finetuned", "tensor_data_layout", "vocab_size"}


def head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rotary_dim(config: Any) -> int:
    """Channels of a head that RoPE turns, in layers that attend to all tokens."""
    share = rope_of(config).get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    return int(head_dim(config) * share)


def rope_of(config: Any, layers: str = "full_attention") -> dict[str, Any]:
    """The RoPE parameters of one type of layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    found: dict[str, Any] = rope.get(layers, rope)
    return found


def windowed_layers(config: Any) -> list[bool]:
    return [kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or []]


# The only accepted value of a key that transformers does not map, from the configuration. Keys of other families, such
# as mixtures of experts, are missing: their files are refused.
EXPECTED: dict[str, Callable[[Any], object]] = {
    "attention.causal": lambda config: True,
    "attention.key_length": head_dim,
    "attention.value_length": head_dim,
    "attention.key_length_swa": head_dim,
    "attention.value_length_swa": head_dim,
    "attention.sliding_window": lambda config: getattr(config, "sliding_window", None),
    "attention.sliding_window_pattern": windowed_layers,
    "attn_logit_softcapping": lambda config: getattr(config, "attn_logit_softcapping", None),
    "final_logit_softcapping": lambda config: getattr(config, "final_logit_softcapping", None),
    "logit_scale": lambda config: 1.0,
    "rope.dimension_count": rotary_dim,
    "rope.dimension_count_swa": head_dim,
    "rope.freq_base": lambda config: rope_of(config).get("rope_theta"),
    "rope.freq_base_swa": lambda config: rope_of(config, "sliding_attention").get("rope_theta"),
    "rope.scaling.factor": lambda config: 1.0,
}


# Model types whose layers all read `sliding_window`, which transformers does not read from the file.
WINDOWED = ("mistral", "phi3", "starcoder2")


def map_keys(path: Path, fields: Mapping[str, Any], config: Any) -> None:
    """Write the keys that transformers ignores into a configuration.

    Args:
        path: the file, for the error.
        fields: the file's metadata by key.
        config: the configuration that transformers has read from them.

    Raises:
        SpecacheError: keys would change the model and cannot be represented.
    """
    keys = unmapped(fields)
    if keys.get("rope.scaling.type") == "none":
        del keys["rope.scaling.type"]
        keys.pop("rope.scaling.factor", None)
    if config.model_type in WINDOWED and "attention.sliding_window" in keys:
        config.sliding_window = keys.pop("attention.sliding_window") or None
    refused = [f"{key} = {value!r}" for key, value in keys.items() if not is_represented(key, value, config)]
    if refused:
        raise SpecacheError(
            f"{path}: transformers does not read {', '.join(refused)} from a GGUF file of this architecture, which "
            "would change the model. Pass the model's safetensors folder or hub name"
        )


def unmapped(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the model, without the architecture's name, that transformers does not map."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    architecture = str(fields["general.architecture"].contents())
    known: dict[str, Any] = {name.replace("_", ""): mapping for name, mapping in GGUF_CONFIG_MAPPING.items()}
    mapping = known.get(architecture.replace("_", "").replace("-", ""), {})
    keys = {key.removeprefix(f"{architecture}."): key for key in fields if key.startswith(f"{architecture}.")}
    return {name: fields[key].contents() for name, key in keys.items() if mapping.get(name) is None}


def is_represented(key: str, value: Any, config: Any) -> bool:
    """Whether a configuration computes what a key requires. In llama.cpp zero and false have no effect."""
    expected = EXPECTED[key](config) if key in EXPECTED else None
    if key in WITHOUT_INFLUENCE or expected is None:
        return key in WITHOUT_INFLUENCE or not value
    if isinstance(value, list):
        items = expected if isinstance(expected, list) else [expected] * len(value)
        return len(value) == len(items) and all(map(is_same, value, items))
    return not isinstance(expected, list) and is_same(value, expected)


def is_same(value: Any, expected: Any) -> bool:
    """Whether two numbers are equal in float32, which GGUF files have."""
    return math.isclose(value, expected, rel_tol=1e-6)
