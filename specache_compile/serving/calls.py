"""The format of tool calls of models for which transformers has none."""

from __future__ import annotations

from typing import Any

from transformers.cli.serving.utils import get_response_template

HERMES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}


def add_format(tokenizer: Any, model: Any) -> None:
    """Give a tokenizer whose chat template writes calls as Hermes does that format, where transformers has none."""
    template = str(getattr(tokenizer, "chat_template", None))
    hermes = "<tool_call>" in template and "<function=" not in template  # Qwen 3.5 writes XML there
    if hermes and get_response_template(tokenizer, model) is None:
        tokenizer.response_template = HERMES
