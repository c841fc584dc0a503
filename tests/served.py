"""A server on a free port of this machine, with a small random model that speaks ASCII and a chat template."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from conftest import LOSSLESS, tiny_llama
from specache_compile.cli import options_of, parser
from specache_compile.serving.command import bound, make_server, url_of
from specache_compile.serving.model import byte_tokenizer

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}<assistant>"
FLAGS = [word for name, value in LOSSLESS.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@dataclass
class Served:
    """A running server: its address, and an OpenAI client of it that takes no answer for granted."""

    url: str
    client: openai.OpenAI
    name: str
    server: Any


@contextlib.contextmanager
def serving(checkpoint: Path, *flags: str) -> Iterator[Served]:
    """`specache serve checkpoint ...`, in a thread."""
    args = parser().parse_args(["serve", str(checkpoint), "--port", "0", "--device", "cpu", *FLAGS, *flags])
    with bound(args.host, args.port) as listener:
        server = make_server(args, options_of(args), listener)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        while not server.started:
            time.sleep(0.01)
        url = url_of(listener)
        try:
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
                yield Served(url, client, str(checkpoint), server)
        finally:
            server.should_exit = True
            thread.join()


def write_checkpoint(folder: Path) -> Path:
    """A model of 128 tokens, the ASCII characters, in a folder."""
    tiny_llama(max_position_embeddings=2048).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder
