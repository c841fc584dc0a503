"""`specache chat`: a conversation in the terminal, whose cache is kept from turn to turn."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

from specache_compile.checkpoints.loaded import limit_of, load_model, open_checkpoint
from specache_compile.checkpoints.names import MODEL
from specache_compile.errors import SpecacheError

from .generate import add_generation, sampling_of

EPILOG = """\
Each line is a turn. Ctrl-C interrupts an answer. Ctrl-D ends the conversation.

examples:
  specache chat smollm2-135m
  specache chat smollm2-135m --system "Answer in one sentence." --temperature 0.7
"""


def add_chat(command: argparse.ArgumentParser) -> None:
    """The arguments of `specache chat`, except the device and the backend's options."""
    command.epilog = EPILOG
    command.add_argument("model", metavar="MODEL", help=MODEL)
    command.add_argument("--system", metavar="TEXT", help="a system message before the first turn")
    add_generation(command, tokens=512)


def run_chat(args: argparse.Namespace, options: dict[str, Any]) -> None:
    """Answer line after line of standard input, until it ends."""
    sampling = sampling_of(args)
    checkpoint = open_checkpoint(args.model)
    if not checkpoint.tokenizer.chat_template:
        raise SpecacheError(f"{args.model}: the tokenizer has no chat template; specache generate continues plain text")
    model, tokenizer = load_model(checkpoint, args.dtype, args.device)
    import torch

    from specache_compile.runtime.stats import stats

    model.compile(backend="specache", options=options)
    if args.sample_seed is not None:
        torch.manual_seed(args.sample_seed)
    chat = Chat(model, tokenizer, args.system, args.max_new_tokens, sampling)
    for text in lines():
        chat.answer(text)
        if args.stats:
            print(stats(model), file=sys.stderr)


def lines() -> Iterator[str]:
    """The lines that are typed, without empty ones. A terminal shows "> " and edits lines as a shell does."""
    typed = sys.stdin.isatty()
    if typed:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (`input` uses it)
        print("Ctrl-C interrupts an answer, Ctrl-D ends the conversation", file=sys.stderr)
    while True:
        try:
            line = input("> " if typed else "")
        except EOFError:
            if typed:
                print()
            return
        except KeyboardInterrupt:
            if not typed:
                raise
            print("\nCtrl-D ends the conversation", file=sys.stderr)
            continue
        if line.strip():
            yield line


class Interrupted(Exception):
    """Ctrl-C was pressed during an answer."""


class Chat:
    """A conversation with a compiled model.

    messages: the turns so far, as chat templates read them.
    cache: the cache.
    ids: int64 [n], its tokens.
    """

    def __init__(
        self, model: Any, tokenizer: Any, system: str | None, max_new_tokens: int, sampling: dict[str, Any]
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.max_new_tokens, self.sampling = max_new_tokens, sampling
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self.begin()

    def begin(self) -> None:
        """Begin with an empty cache."""
        import torch
        from transformers import DynamicCache

        self.cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        self.ids = torch.empty(0, dtype=torch.int64, device="cpu")

    def answer(self, text: str) -> str:
        """Print the answer to `text` while it is generated, and return it. An interrupted answer stays as it is."""
        from specache_compile.compat import with_cache

        messages = [*self.messages, {"role": "user", "content": text}]
        inputs = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        prompt = inputs["input_ids"][0]
        room = limit_of(self.model) - len(prompt)
        if room < 1:
            raise SpecacheError(
                f"the conversation has {len(prompt):,} tokens, and the model's context is {limit_of(self.model):,}: "
                "begin a new one"
            )
        self.keep_shared(prompt)
        with interruptible() as pressed:
            streamer = streamer_of(self.tokenizer, pressed)
            with contextlib.suppress(Interrupted):
                self.model.generate(
                    **inputs.to(self.model.device), **with_cache(self.cache), streamer=streamer,
                    max_new_tokens=min(self.max_new_tokens, room), **self.sampling,
                )  # fmt: skip
        streamer.end()
        self.note(streamer.ids)
        answer = self.tokenizer.decode(streamer.ids[len(prompt) :], skip_special_tokens=True)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return str(answer)

    def keep_shared(self, prompt: Any) -> None:
        """Cut the cache to the prompt's beginning; at least the last token is left to the model. A cache that cannot
        be cut is replaced."""
        from specache_compile.batching.prefixes import can_crop, shared

        gone = len(self.ids) - min(shared(self.ids, prompt), len(prompt) - 1)
        if gone and not can_crop(self.cache):
            self.begin()
        elif gone:
            self.cache.crop(-gone)
            self.ids = self.ids[:-gone]

    def note(self, ids: list[int]) -> None:
        """Note the cache's tokens after an answer; ids: the prompt's and the answer's."""
        import torch

        held = self.cache.get_seq_length()
        if held > len(ids):  # a step ran whose token was not delivered
            self.cache.crop(len(ids) - held)
        self.ids = torch.tensor(ids[:held], dtype=torch.int64, device="cpu")


def streamer_of(tokenizer: Any, pressed: list[bool]) -> Any:
    """A streamer that prints an answer, and notes the tokens: `ids`, the prompt's first. It raises Interrupted after
    Ctrl-C, between two steps, so that the cache stays whole."""
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def __init__(self) -> None:
            super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.ids: list[int] = []

        def put(self, value: Any) -> None:
            self.ids += value.flatten().tolist()
            super().put(value)
            if pressed:
                raise Interrupted

    return Streamer()


@contextlib.contextmanager
def interruptible() -> Iterator[list[bool]]:
    """Within it, Ctrl-C adds to the list; a second one raises KeyboardInterrupt at once."""
    pressed: list[bool] = []
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, before)
        pressed.append(True)
        print("\ninterrupted after this step; Ctrl-C again ends the program", file=sys.stderr)

    signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
