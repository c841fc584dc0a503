"""Picture models, whole: tiny random ones, whose text goes on from an image as the uncompiled model's does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from conftest import LOSSLESS, prompt
from specache_compile import SpecacheWarning
from specache_compile.runtime.records import find_record

IMAGE, VIDEO, START, END = 124, 125, 126, 127  # tokens that the prompts have nowhere else
NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
TEXT = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024, "initializer_range": 0.2, **NO_TOKENS,
}  # fmt: skip
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
QWEN = {
    "text_config": {**TEXT, **MROPE}, "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START,
    "vision_end_token_id": END, "tie_word_embeddings": False,
}  # fmt: skip
CLIP = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4, "num_channels": 3,
}  # fmt: skip


def patches() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(16, 3 * 2 * 4 * 4), "image_grid_thw": torch.tensor([[1, 4, 4]])}


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

    def model(self) -> Any:
        torch.manual_seed(0)
        config = getattr(transformers, f"{self.kind}Config")(**self.settings)
        model = getattr(transformers, f"{self.kind}ForConditionalGeneration")._from_config(config).float().eval()
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
    "qwen2_vl": Pictures(
        "Qwen2VL",
        {
            **QWEN,
            "vision_config": {
                "depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2,
            },
        },
        patches,
        4,
        "mm_token_type_ids",
    ),
    "qwen2_5_vl": Pictures(
        "Qwen2_5_VL",
        {
            **QWEN,
            "vision_config": {
                "depth": 1, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64, "num_heads": 2,
                "patch_size": 4, "window_size": 16, "fullatt_block_indexes": [0],
            },
        },
        patches,
        4,
        "mm_token_type_ids",
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
QUICK = "llava"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == QUICK else [pytest.mark.slow]) for name in MODELS]
)
def test_the_text_behind_an_image_is_the_uncompiled_models(name: str) -> None:
    """A first and a second image, each answered for itself; the text's attention is rewritten in two lanes."""
    pictures = MODELS[name]
    plain, model = pictures.model(), pictures.model()
    model.compile(backend="specache", options=LOSSLESS)
    asked = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    answers = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpecacheWarning)
        for seed in (3, 4):
            expected = plain.generate(**pictures.inputs(seed), **asked)
            got = model.generate(**pictures.inputs(seed), **asked)
            assert torch.equal(got.sequences, expected.sequences)
            torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), atol=1e-3, rtol=0)
            answers.append(expected.sequences)
    assert not torch.equal(*answers), "the image must matter"
    record = find_record(model)
    assert record is not None
    assert {(g.phase, len(g.captured.sites), len(g.captured.left_alone)) for g in record.graphs} == {
        ("prefill", 1, 0), ("decode", 1, 0),
    }  # fmt: skip
    reports = [report for g in record.graphs for trace in g.rewrites.traces for report in trace.reports]
    assert {report.counts["lanes"] for report in reports if report.name == "speculate"} >= {2}
