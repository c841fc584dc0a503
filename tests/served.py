"""A server on a free port of this machine, with a small random ASCII model and a chat template."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import LlamaForCausalLM
from transformers.utils.chat_template_utils import render_jinja_template

from conftest import LOSSLESS, byte_tokenizer, tiny_llama
from specache_compile.cli import options_of, parsed
from specache_compile.serving.answer import Answer, Question
from specache_compile.serving.calls import parser_of
from specache_compile.serving.metrics import Metrics
from specache_compile.serving.replies import Reply
from specache_compile.serving.serve import bound, make_server, url_of

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'critic' %}{{ raise_exception('no critics here') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FLAGS = [word for name, value in LOSSLESS.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@dataclass
class Served:
    """A running server: its address, the model's name, and an OpenAI client without retries."""

    url: str
    name: str
    client: openai.OpenAI

    def complete(self, prompt: str, tokens: int | None = None, **more: Any) -> Any:
        """Return the response to a prompt, by default greedy and of the server's number of tokens."""
        given: dict[str, Any] = {"temperature": 0, **({} if tokens is None else {"max_tokens": tokens}), **more}
        return self.client.completions.create(model=self.name, prompt=prompt, **given)


@contextlib.contextmanager
def running(args: argparse.Namespace, options: dict[str, Any], warm: bool = False) -> Iterator[str]:
    """Serve in a thread of this process; yield the server's URL when it responds."""
    with bound(args.host, args.port) as listener:
        server = make_server(args, options, listener)
        if warm:
            server.generation.warm_up()
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive(), "the server did not start"
                time.sleep(0.01)
            yield url_of(listener)
        finally:
            server.should_exit = True
            thread.join()


@contextlib.contextmanager
def serving(checkpoint: Path, *flags: str, warm: bool = False) -> Iterator[Served]:
    """Run `specache serve checkpoint ...`."""
    args = parsed(["serve", str(checkpoint), "--port", "0", "--device", "cpu", *FLAGS, *flags])
    with (
        running(args, options_of(args), warm) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Served(url, str(checkpoint), client)


def write_checkpoint(folder: Path) -> Path:
    """Write a model of 128 tokens, the ASCII characters, to a folder."""
    tiny_llama(max_position_embeddings=2048).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def qwens_parser(prompt: str = "<|im_start|>assistant\n<think>\n") -> Any:
    """Return the parser of Qwen 3's reply to this prompt."""
    model: Any = tiny_llama()
    model.config.model_type = "qwen3"
    return parser_of(byte_tokenizer(), model, prompt, "", None)


def reply(
    tokens: list[int], question: Question, tokenizer: Any, kind: type[Reply] = Reply, streamed: bool = False
) -> Any:
    """Return the response, or its events, for a model that generates these tokens."""

    async def said() -> Any:
        answer = Answer(question, tokenizer, Metrics())
        for token in tokens:
            if answer.put(token):
                break
        answer.end()
        if not streamed:
            return json.loads((await kind("tiny", answer).whole()).body)
        return [event.removeprefix("data: ").strip() async for event in kind("tiny", answer).events(usage=True)]

    return asyncio.run(said())


def one_of(**fields: list[str]) -> dict[str, Any]:
    """Return the schema of an object with these fields, each with one of its values."""
    properties = {name: {"enum": values} for name, values in fields.items()}
    return {"type": "object", "properties": properties, "required": [*fields], "additionalProperties": False}


def prompt_of(messages: list[dict[str, str]]) -> str:
    return render_jinja_template([messages], chat_template=TEMPLATE, add_generation_prompt=True)[0][0]


def answer(model: LlamaForCausalLM, prompt: str, tokens: int) -> str:
    """Return the uncompiled model's greedy reply."""
    ids = torch.tensor([list(prompt.encode())])
    said = model.generate(ids, max_new_tokens=tokens, do_sample=False)[0, ids.shape[1] :]
    return bytes(said.tolist()).decode()


def figures(served: Served) -> dict[str, float]:
    """Return the values of /metrics, by name and values of labels."""
    with urllib.request.urlopen(f"{served.url}/metrics") as page:
        families = text_string_to_metric_families(page.read().decode())
        return {" ".join((s.name, *s.labels.values())): s.value for family in families for s in family.samples}


def grown(served: Served, before: dict[str, float], name: str) -> float:
    return figures(served).get(name, 0.0) - before.get(name, 0.0)


def chat_once(served: Served, messages: list[dict[str, str]], tokens: int = 8) -> str:
    ask: Any = {"model": served.name, "messages": messages, "max_tokens": tokens, "temperature": 0}
    return served.client.chat.completions.create(**ask).choices[0].message.content or ""


def wait_for(served: Served, name: str, value: float) -> None:
    end = time.monotonic() + 20
    while figures(served)[name] != value:
        assert time.monotonic() < end
        time.sleep(0.02)


def posted(served: Served, path: str, body: dict[str, Any] | bytes) -> tuple[int, str]:
    """Return the status, and the raw text of a response or an error."""
    given = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{served.url}/{path}", given, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)["error"]["message"]
