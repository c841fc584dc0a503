"""A server on a free port of this machine, with a small random model that speaks ASCII and a chat template."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai

from conftest import LOSSLESS, tiny_llama
from specache_compile.cli import options_of, parser
from specache_compile.serving.command import running
from specache_compile.serving.model import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'critic' %}{{ raise_exception('no critics here') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}<assistant>"
)
FLAGS = [word for name, value in LOSSLESS.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@dataclass
class Served:
    """A running server: its address, the model's name, and an OpenAI client of it, which asks once."""

    url: str
    name: str
    client: openai.OpenAI


@contextlib.contextmanager
def serving(checkpoint: Path, *flags: str) -> Iterator[Served]:
    """`specache serve checkpoint ...`."""
    args = parser().parse_args(["serve", str(checkpoint), "--port", "0", "--device", "cpu", *FLAGS, *flags])
    with (
        running(args, options_of(args)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Served(url, str(checkpoint), client)


def write_checkpoint(folder: Path) -> Path:
    """A model of 128 tokens, the ASCII characters, in a folder."""
    tiny_llama(max_position_embeddings=2048).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder
