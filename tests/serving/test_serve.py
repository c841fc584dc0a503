"""`specache serve`, asked by OpenAI's client as anyone has it; answers are the uncompiled model's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from served import TEMPLATE, Served, serving, write_checkpoint

pytestmark = pytest.mark.one_process


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def uncompiled(checkpoint: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(checkpoint).eval()


@pytest.fixture(scope="module")
def served(checkpoint: Path) -> Iterator[Served]:
    with serving(checkpoint) as served:
        yield served


def prompt_of(messages: list[dict[str, str]]) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template([messages], chat_template=TEMPLATE)[0][0]


def answer(model: LlamaForCausalLM, prompt: str, tokens: int) -> str:
    """What the uncompiled model says, greedy."""
    ids = torch.tensor([list(prompt.encode())])
    said = model.generate(ids, max_new_tokens=tokens, do_sample=False)[0, ids.shape[1] :]
    return bytes(said.tolist()).decode()


def test_a_chat_is_the_uncompiled_models(served: Served, uncompiled: LlamaForCausalLM) -> None:
    messages = [{"role": "user", "content": "What do you keep on the device? " * 4}]
    ask: dict[str, Any] = {"model": served.name, "messages": messages, "max_tokens": 12, "temperature": 0}
    expected = answer(uncompiled, prompt_of(messages), 12)
    whole = served.client.chat.completions.create(**ask)
    assert whole.choices[0].message.content == expected
    assert whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(prompt_of(messages)), 12)
    pieces = [chunk.choices[0].delta.content for chunk in served.client.chat.completions.create(**ask, stream=True)]
    assert "".join(filter(None, pieces)) == expected
    assert len(pieces) > 3
