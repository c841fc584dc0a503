"""A soak test of the server: concurrent clients, each answer compared with the uncompiled model.

    python benchmarks/serve_soak.py --minutes 10    (--clients 8; Ctrl-C ends it and prints the table)

A tiny random model is served in a lossless setting. Prompts share prefixes; clients stream, continue or disconnect. The
server is killed and restarted half way. Exit status 1: an answer differs, or memory is left at the end.
"""

from __future__ import annotations

import argparse
import random
import socket
import string
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import torch
from prometheus_client.parser import text_string_to_metric_families
from soak import LOSSLESS, tiny
from tabulate import tabulate
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaForCausalLM

OPTIONS = {**LOSSLESS, "lowering": "eager"}
# Characters that prompts share: about ends of groups, windows, pages and chunks. A second turn stays below `top_k`.
SHARED = [n + by for n in (32, 64, 256, 512, 768) for by in (-40, -32, 0)]
TALKS = 48
# Of memory for all tiers: few rows' pages, so that requests wait, and sessions are evicted.
MIB = 24
ANSWER = 24
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}<assistant>"
Messages = list[dict[str, str]]


@dataclass
class Talk:
    """Two questions and the uncompiled model's answers."""

    messages: Messages
    expected: list[str] = field(default_factory=list)

    def until(self, turn: int) -> Messages:
        """The messages of a turn's request."""
        return self.messages[: 1 + 2 * turn]


class Server:
    """`specache serve` in a separate process, with the same port and folder at each start."""

    def __init__(self, checkpoint: Path, folder: Path, clients: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        flags = [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        self.command = [
            sys.executable, "-m", "specache_compile.cli", "serve", str(checkpoint), "--port", str(self.port),
            "--device", "cpu", "--session-folder", str(folder), "--queue", str(2 * clients), *flags,
            "--session-host-gib", str(MIB / 1024),
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, stderr=subprocess.DEVNULL)
        while not answers(self.port):
            if self.process.poll() is not None:
                raise SystemExit(f"the server did not start: {' '.join(self.command)}")
            time.sleep(0.1)

    def figures(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as page:
            families = text_string_to_metric_families(page.read().decode())
            return {" ".join((s.name, *s.labels.values())): s.value for family in families for s in family.samples}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def answers(port: int) -> bool:
    """Whether a server is up."""
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
    except OSError:
        return False
    return True


def write_checkpoint(model: LlamaForCausalLM, folder: Path) -> None:
    """A model of ASCII characters, whose answers read back as the tokens that they were."""
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parent.parent / "examples" / "needle-llama")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def talks_of(model: LlamaForCausalLM, folder: Path, seed: int) -> list[Talk]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chance = random.Random(seed)
    beginning = "".join(chance.choices(string.ascii_letters, k=max(SHARED)))
    talks = []
    for _ in tqdm(range(TALKS), "what the uncompiled model says", file=sys.stderr):
        own = "".join(chance.choices(string.ascii_letters, k=chance.randrange(1, 90)))
        talk = Talk([{"role": "user", "content": beginning[: max(0, chance.choice(SHARED))] + own}])
        for more in ("And then?", ""):
            text = tokenizer.apply_chat_template(talk.messages, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
            seen = torch.ones_like(ids)  # otherwise a generated token 0 counts as padding
            text = model.generate(ids, attention_mask=seen, max_new_tokens=ANSWER, do_sample=False)[0, ids.shape[1] :]
            talk.expected.append(tokenizer.decode(text))
            answer = {"role": "assistant", "content": talk.expected[-1]}
            talk.messages += [answer, {"role": "user", "content": more}]
        talks.append(talk)
    return talks


class ServerSoak:
    """What all clients share.

    ends: when they stop.
    down: the server is being killed and started: an answer may break off.
    """

    def __init__(self, server: Server, name: str, talks: list[Talk], ends: float) -> None:
        self.server, self.name, self.talks, self.ends = server, name, talks, ends
        self.counts: Counter[str] = Counter()
        self.down = threading.Event()
        self.faults: list[str] = []

    @property
    def is_over(self) -> bool:
        return bool(self.faults) or time.monotonic() >= self.ends

    def client(self, seed: int) -> None:
        chance = random.Random(seed)
        url = f"http://127.0.0.1:{self.server.port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as client:
            while not self.is_over:
                talk = chance.choice(self.talks)
                for turn in range(chance.choice((1, 1, 2))):
                    if not self.send(client, talk, turn, chance):
                        break
                time.sleep(chance.expovariate(2.0))

    def send(self, client: openai.OpenAI, talk: Talk, turn: int, chance: random.Random) -> bool:
        """One question; whether its whole answer came."""
        leaves = chance.randrange(1, ANSWER) if chance.random() < 0.3 else None
        down = self.down.is_set()
        try:
            text = self.answer(client, talk.until(turn), leaves, chance.random() < 0.5)
        except (openai.APIError, OSError) as error:
            if down or self.down.is_set() or not answers(self.server.port):
                self.counts["broken off with the server"] += 1
                time.sleep(0.5)
            else:
                self.faults.append(f"{type(error).__name__}: {error}")
            return False
        expected, whole = talk.expected[turn], leaves is None
        if text != expected if whole else not expected.startswith(text):
            self.faults.append(f"to {talk.until(turn)}: {text!r}, not {expected!r}")
        self.counts[f"turn {turn + 1}" if whole else "left by their clients"] += 1
        return whole

    def answer(self, client: openai.OpenAI, messages: Messages, leaves: int | None, at_once: bool) -> str:
        """The answer's text, whole or as a stream; leaves: the pieces after which the client disconnects."""
        request: dict[str, Any] = {"model": self.name, "messages": messages, "max_tokens": ANSWER, "temperature": 0}
        if leaves is None and at_once:
            return client.chat.completions.create(**request).choices[0].message.content or ""
        text = ""
        with client.chat.completions.create(**request, stream=True) as stream:
            for pieces, piece in enumerate(stream, 1):
                text += (piece.choices[0].delta.content or "") if piece.choices else ""
                if pieces == leaves:
                    break
        return text

    def restart(self) -> None:
        """Kill the server, and start it on the same port and folder."""
        self.down.set()
        self.server.kill()
        self.server.start()
        self.down.clear()


def run(soak: ServerSoak, args: argparse.Namespace) -> None:
    """Run the clients; restart the server half way."""
    clients = [threading.Thread(target=soak.client, args=(args.seed + n,), daemon=True) for n in range(args.clients)]
    for client in clients:
        client.start()
    seconds = int(60 * args.minutes)
    try:
        for second in tqdm(range(seconds), unit="s", file=sys.stderr):
            if soak.is_over:
                break
            if second == seconds // 2:
                soak.restart()
            time.sleep(1)
    except KeyboardInterrupt:
        soak.ends = 0
    for client in clients:
        client.join(timeout=300)


def left(server: Server) -> list[str]:
    """What is there of requests a minute after all clients have gone."""
    there = ["the server"]
    for _ in range(300):
        figures = server.figures()
        there = [name for name in ("specache_queue", "specache_running") if figures[name]]
        if not there:
            break
        time.sleep(0.2)
    return there


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="(%(default)s)")
    parser.add_argument("--clients", type=int, default=32, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "model"
        model = tiny(args.seed, layers=2)
        write_checkpoint(model, checkpoint)
        talks = talks_of(model, checkpoint, args.seed)
        server = Server(checkpoint, Path(folder) / "sessions", args.clients)
        soak = ServerSoak(server, str(checkpoint), talks, time.monotonic() + 60 * args.minutes)
        try:
            run(soak, args)
            soak.faults += [f"{name} is not 0, though all clients have gone" for name in left(server)]
            evicted = sum(value for name, value in server.figures().items() if name.startswith("specache_evicted"))
        finally:
            server.kill()
    print(tabulate([*sorted(soak.counts.items()), ("sessions evicted by the second server", int(evicted))]))
    for fault in soak.faults:
        print(fault, file=sys.stderr)
    return int(bool(soak.faults))


if __name__ == "__main__":
    sys.exit(main())
