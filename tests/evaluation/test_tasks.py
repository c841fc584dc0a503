"""The tasks of `specache eval`: what their prompts hold, and their figures against plain computations."""

from __future__ import annotations

import random
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import LOSSLESS, byte_tokenizer, compile_copy, tiny_llama
from specache_compile.command_line import evaluate
from specache_compile.errors import SpecacheError
from specache_compile.evaluation.reader import Reader
from specache_compile.evaluation.runner import Runner
from specache_compile.evaluation.tasks import TASKS, needle, perplexity
from specache_compile.evaluation.tasks.task import Bench

BYTES = Reader(byte_tokenizer())


def test_the_command_line_names_every_task() -> None:
    assert tuple(TASKS) == evaluate.TASKS


def bench(**changes: Any) -> Bench:
    return Bench(**{"reader": BYTES, "samples": 6, "seed": 3, **changes})


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(vocab_size=256)


class Recorder(Runner):
    """A runner that stores every prompt and generates empty answers."""

    def __init__(self) -> None:
        super().__init__(None, BYTES)
        self.prompts_seen: list[bytes] = []

    def answers(self, prompts: Any, new_tokens: int) -> list[str]:
        self.prompts_seen += [bytes(prompt) for prompt in prompts]
        self.longest = max(map(len, prompts)) + new_tokens
        return [""] * len(prompts)

    def answers_apart(self, prompts: Any, new_tokens: int) -> list[str]:
        """Context and question, a zero between them."""
        return self.answers([[*context, 0, *question] for context, question in prompts], new_tokens)


def test_prompt_and_answer_fill_the_asked_length_and_no_more() -> None:
    for length in (400, 600):
        cell, runner = TASKS["needle"](bench(), length), Recorder()
        assert cell.measure(runner).score == 0.0
        assert len(runner.prompts_seen) == 6
        assert runner.longest == cell.context == int(cell.name) == length


@pytest.mark.parametrize(
    ("task", "length", "reason"),
    [("closeness", 25, "25 tokens are too few. Pass --lengths of 26 or more"),
     ("perplexity", 0, "too short, 0 tokens are left")],
)  # fmt: skip
def test_a_context_without_room_for_its_text_is_refused(task: str, length: int, reason: str) -> None:
    with pytest.raises(SpecacheError, match=reason):
        TASKS[task](bench(), length)


@pytest.mark.quick_for("needle")
@pytest.mark.parametrize("task", ["needle", "perplexity"])
def test_draws_are_a_function_of_the_seed(task: str) -> None:
    def prompts(seed: int) -> list[Any]:
        if task == "perplexity":
            return bench(seed=seed).windows_apart(400)
        runner = Recorder()
        TASKS[task](bench(seed=seed), 400).measure(runner)
        return runner.prompts_seen

    assert prompts(1) == prompts(1)
    assert prompts(1) != prompts(2)


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_needle_stands_at_its_depth(depth: float) -> None:
    one = needle.key_question(bytes(1000), 300, depth, random.Random(0), str.encode)
    text = bytes(one.prompt)
    found = text.index(b"\nThe pass key is " + one.answer.encode())
    room = 300 - len(needle.NEEDLE.format(key="12345")) - len(needle.QUESTION)
    assert found == round(depth * room)
    assert text.endswith(needle.QUESTION.encode())


@pytest.mark.parametrize("chat", [False, True])
def test_of_four_named_keys_one_is_requested_and_stands_at_its_depth(chat: bool) -> None:
    def prompt(rng: random.Random) -> Any:
        if chat:
            tokenizer = byte_tokenizer()
            tokenizer.chat_template = "<{{ messages[0]['content'] }}>"
            around = Reader(tokenizer).around()
            return needle.key_question(bytes(3000), 1000, 0.5, rng, BYTES.encode, 4, around, chat=True)
        return needle.key_question(bytes(3000), 1000, 0.5, rng, str.encode, keys=4)

    one, text = prompt(random.Random(0)), bytes(prompt(random.Random(0)).prompt).decode()
    found = re.findall(r"The pass key of (\w+) is (\d{5})\. Remember it\. (\d{5}) is the pass key of (\w+)\.", text)
    assert len({name for name, *_ in found}) == len(found) == 4
    assert all((name, key) == (again, repeated) for name, key, repeated, again in found)
    name = next(name for name, key, *_ in found if key == one.answer)
    assert f"What is the pass key of {name}?" in bytes(one.apart[1]).decode()
    assert len(text) == 1000
    filler = text[: text.index(f"\nThe pass key of {name} is")].count("\0")
    assert filler == pytest.approx(0.5 * text.count("\0"), abs=1)


def test_perplexity_is_the_exponent_of_the_mean_loss(model: Any) -> None:
    rows = bench(samples=3).windows_apart(80)
    outcome = perplexity.measure(Runner(model, BYTES, batch_size=2), rows)
    with torch.no_grad():
        logits = model(torch.tensor(rows), use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(logits[:, 40:-1].flatten(0, 1), torch.tensor(rows)[:, 41:].flatten())
    assert outcome.score == pytest.approx(losses.exp().item(), rel=1e-4)
    assert outcome.samples == 3 * 39
    assert statistics.fmean(outcome.detail["nats"]) == pytest.approx(losses.item(), rel=1e-4)


def test_a_context_is_read_before_its_question_is_known(model: Any) -> None:
    """Two of the same lengths in one batch."""
    read: list[tuple[int, ...]] = []
    with model.register_forward_pre_hook(
        lambda _, args, given: read.append(tuple((args[0] if args else given["input_ids"]).shape)), with_kwargs=True
    ):
        Runner(model, BYTES).answers_apart([(b"a" * 40, b"why?"), (b"b" * 40, b"who?"), (b"c" * 30, b"what?")], 2)
    assert read == [(2, 40), (2, 4), (2, 1), (1, 30), (1, 5), (1, 1)]


def test_a_blind_prompt_is_the_same_in_two_parts() -> None:
    joined, parted, short = Recorder(), Recorder(), {"texts": (Path(__file__),)}
    assert "blind" not in TASKS["needle"](bench(**short), 400).measure(joined).metric
    assert TASKS["needle"](bench(**short, blind=True), 400).measure(parted).metric.endswith(", blind")
    assert [prompt.replace(b"\0", b"", 1) for prompt in parted.prompts_seen] == joined.prompts_seen
    assert all(prompt.split(b"\0")[1].startswith(needle.QUESTION.encode()) for prompt in parted.prompts_seen)


def test_answers_keep_their_prompts_order_over_lengths_and_batches(model: Any) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(n)] for n in (20, 20, 20, 31, 20)]
    together = Runner(model, BYTES, batch_size=2).answers(prompts, 4)
    assert together == [Runner(model, BYTES).answers([prompt], 4)[0] for prompt in prompts]


def test_a_tokenizers_bos_stands_once_before_a_prompt() -> None:
    class Tokenizer:
        bos_token_id = 1

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            return {"input_ids": [1] * add_special_tokens + [10 + letter for letter in text.encode()]}

        def decode(self, ids: Any, skip_special_tokens: bool) -> str:
            return bytes(token - 10 for token in ids if token != 1).decode()

    reader = Reader(Tokenizer())
    assert reader.begin() == [1]
    assert reader.decode(reader.encode("abc")) == "abc"
    runner = Recorder()
    TASKS["needle"](bench(reader=reader), 300).measure(runner)
    assert all(prompt[0] == 1 and prompt.count(b"\x01") == 1 for prompt in runner.prompts_seen)


def test_text_files_take_the_librarys_place(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab" * 500)
    assert set(bench(texts=(tmp_path / "a.txt",)).haystack) == set(b"ab")


@pytest.mark.parametrize("compiled", [False, True])
def test_answers_to_a_question_read_apart_are_those_to_the_whole_prompts(model: Any, compiled: bool) -> None:
    runner = Runner(compile_copy(model, **LOSSLESS) if compiled else model, BYTES)
    rng = random.Random(0)
    context = [rng.randrange(256) for _ in range(120)]
    questions = [[rng.randrange(256) for _ in range(n)] for n in (7, 12)]
    whole = Runner(model, BYTES).answers([[*context, *question] for question in questions], 6)
    assert runner.answers_apart([(context, question) for question in questions], 6) == whole


def test_a_chat_answer_counts_where_it_contains_the_key() -> None:
    scores = [(needle.is_right(answer, "12345", False), needle.is_right(answer, "12345", True))
              for answer in ("12345", " 12345.", "The key is 12345.", "12354")]  # fmt: skip
    assert scores == [(True, True), (True, True), (False, True), (False, False)]
