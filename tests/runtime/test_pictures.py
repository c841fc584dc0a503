"""Picture models, whole and their language model alone: tiny random ones, whose text goes on from an image as the
uncompiled model's does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from conftest import compile_copy, prompt
from families import COMMON
from specache_compile import SpecacheWarning
from specache_compile.runtime.records import find_record

IMAGE, VIDEO, START, END = 124, 125, 126, 127  # tokens that the prompts have nowhere else
NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
TEXT = {name: value for name, value in COMMON.items() if name != "tie_word_embeddings"} | {"num_hidden_layers": 1}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
QWEN = {
    "text_config": {**TEXT, **MROPE}, "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START,
    "vision_end_token_id": END, "tie_word_embeddings": False,
}  # fmt: skip
WINDOWS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}
CLIP = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4, "num_channels": 3,
}  # fmt: skip


def patches() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(16, 3 * 2 * 4 * 4), "image_grid_thw": torch.tensor([[1, 4, 4]])}


def placed_patches() -> dict[str, Tensor]:
    places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1)
    return {"pixel_values": torch.rand(1, 16, 3 * 4 * 4), "image_position_ids": places.view(1, 16, 2)}


def pixels(*leading: int) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"pixel_values": torch.randn(*leading, 3, 16, 16)}


def prefixed() -> dict[str, Tensor]:
    """All of the prompt is prefix, whose tokens see each other."""
    return {**pixels(1)(), "token_type_ids": torch.zeros(1, 60, dtype=torch.int64)}


@dataclass(frozen=True)
class Pictures:
    """A picture model: its class and config, what it is given of an image, and how many tokens that stands for."""

    kind: str
    settings: dict[str, Any]
    image: Callable[[], dict[str, Tensor]]
    tokens: int
    types: str | None = None  # the name of an input that marks the image's tokens
    exact: int = 0  # attentions with a window, which stay exact

    def model(self) -> Any:
        torch.manual_seed(0)
        config = getattr(transformers, f"{self.kind}Config")(**self.settings)
        model = getattr(transformers, f"{self.kind}ForConditionalGeneration")._from_config(config).float().eval()
        for weight in model.parameters():
            if not weight.any():  # Gemma 3's projection, which would let no image through
                torch.nn.init.normal_(weight.data)
        for name, value in NO_TOKENS.items():
            setattr(model.generation_config, name, value)
        return model

    def inputs(self, seed: int) -> dict[str, Tensor]:
        """One prompt, with an image by seed."""
        ids = prompt(60, vocabulary=IMAGE)
        ids[:, 3], ids[:, 4 : 4 + self.tokens], ids[:, 4 + self.tokens] = START, IMAGE, END
        torch.manual_seed(seed)
        types = {} if self.types is None else {self.types: (ids == IMAGE).int()}
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **self.image(), **types}


def qwen(kind: str, **vision: Any) -> Pictures:
    settings = {**QWEN, "vision_config": {"num_heads": 2, "patch_size": 4, **vision}}
    return Pictures(kind, settings, patches, 4, "mm_token_type_ids")


MODELS = {
    "llava": Pictures(
        "Llava",
        {
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": {"model_type": "clip_vision_model", **CLIP},
            "image_token_index": IMAGE,
            "image_seq_length": 16,
            "vision_feature_layer": -1,
        },
        pixels(1),
        16,
    ),
    "qwen2_vl": qwen("Qwen2VL", depth=1, embed_dim=32, hidden_size=64, mlp_ratio=2),
    "qwen2_5_vl": qwen(
        "Qwen2_5_VL", depth=1, hidden_size=32, out_hidden_size=64, intermediate_size=64, window_size=16,
        fullatt_block_indexes=[0],
    ),
    "qwen3_vl": qwen(
        "Qwen3VL", depth=2, hidden_size=32, out_hidden_size=64, intermediate_size=64, num_position_embeddings=16,
        deepstack_visual_indexes=[0],
    ),
    "gemma3": Pictures(
        "Gemma3",
        {
            "text_config": {"model_type": "gemma3_text", **TEXT, **WINDOWS},
            "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **CLIP},
            "image_token_index": IMAGE,
            "mm_tokens_per_image": 4,
        },
        pixels(1),
        4,
        "token_type_ids",
        exact=1,
    ),
    "gemma4": Pictures(
        "Gemma4",
        {
            "text_config": {
                "model_type": "gemma4_text", **TEXT, **WINDOWS, "global_head_dim": 16, "num_global_key_value_heads": 2,
                "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16, "pad_token_id": 0,
                "use_bidirectional_attention": "vision",
            },
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
                "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2,
                "position_embedding_size": 16,
            },
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "audio_token_id": VIDEO,
        },
        placed_patches,
        4,
        "mm_token_type_ids",
        exact=1,
    ),
    "idefics3": Pictures(
        "Idefics3",
        {
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": CLIP,
            "image_token_id": IMAGE,
            "scale_factor": 2,
        },
        pixels(1, 1),
        4,
    ),
    "paligemma": Pictures(
        "PaliGemma",
        {
            "text_config": {"model_type": "gemma", **TEXT},
            "vision_config": {
                "model_type": "siglip_vision_model", "projection_dim": 64, "vision_use_head": False, **CLIP,
            },
            "image_token_index": IMAGE,
            "projection_dim": 64,
            "hidden_size": 64,
        },
        prefixed,
        16,
    ),
}  # fmt: skip


def assert_same_answers(pictures: Pictures, model: Any, plain: Any) -> None:
    """To a first and a second image, each answered for itself."""
    requested = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    answers = []
    for seed in (3, 4):
        expected = plain.generate(**pictures.inputs(seed), **requested)
        got = model.generate(**pictures.inputs(seed), **requested)
        assert torch.equal(got.sequences, expected.sequences)
        torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), atol=1e-3, rtol=0)
        answers.append(torch.stack(expected.logits))
    assert not torch.allclose(*answers, atol=2e-3), "the image must matter"


def lanes(compiled: Any, pictures: Pictures) -> set[int]:
    """Those of its decode; all of its graphs are rewritten."""
    record = find_record(compiled)
    assert {(g.captured.phase.name, len(g.captured.sites), len(g.captured.left_alone)) for g in record.graphs} == {
        ("prefill", 1, pictures.exact), ("decode", 1, pictures.exact),
    }  # fmt: skip
    made = [each for graph in record.graphs for each in graph.rewrites.made.values()]
    return {each.lanes for each in made if each.variant.phase.name == "decode"}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.quick_for("llava")
@pytest.mark.parametrize("name", MODELS)
def test_the_text_behind_an_image_is_the_uncompiled_models(name: str) -> None:
    """The text's attention is rewritten, in two lanes without sliding windows."""
    pictures = MODELS[name]
    plain = pictures.model()
    model = compile_copy(plain)
    with warnings.catch_warnings(action="error", category=SpecacheWarning):
        if pictures.exact:
            warnings.filterwarnings("ignore", "this model's decode runs one token at a time")
        assert_same_answers(pictures, model, plain)
    assert lanes(model, pictures) == {1 if pictures.exact else 2}
