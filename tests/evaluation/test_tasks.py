"""The tasks of `specache eval`: what their prompts hold, and their figures against plain computations."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import LOSSLESS, compile_copy, tiny_llama
from specache_compile.errors import SpecacheError
from specache_compile.evaluation.reader import ByteReader, TokenizerReader
from specache_compile.evaluation.runner import Runner
from specache_compile.evaluation.settings import parse_setting, running
from specache_compile.evaluation.tasks import (
    TASKS,
    aggregation,
    fidelity,
    multikey,
    needle,
    perplexity,
    shared_context,
    variables,
)
from specache_compile.evaluation.tasks.haystack import hide, library_source
from specache_compile.evaluation.tasks.longbench import without_middle
from specache_compile.evaluation.tasks.task import Bench

BYTES = ByteReader()
LENGTHLY = ("needle", "multikey", "variables", "aggregation", "shared_context", "perplexity", "fidelity")


def bench(**changes: Any) -> Bench:
    return Bench(**{"reader": BYTES, "lengths": (400, 600), "samples": 6, "seed": 3, "limit": 2304, **changes})


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(vocab_size=256)


class Recorder(Runner):
    """A runner that keeps every prompt it is asked, and answers with nothing."""

    def __init__(self) -> None:
        super().__init__(None, BYTES)
        self.asked: list[bytes] = []

    def answers(self, prompts: Any, new_tokens: int) -> list[str]:
        self.asked += [bytes(prompt) for prompt in prompts]
        self.longest = max(map(len, prompts)) + new_tokens
        return [""] * len(prompts)


@pytest.mark.parametrize("task", ["needle", "multikey", "variables", "aggregation"])
def test_prompt_and_answer_fill_the_asked_length_and_no_more(task: str) -> None:
    for cell in TASKS[task](bench()):
        runner = Recorder()
        assert cell.measure(runner).score == 0.0
        assert len(runner.asked) == 6
        assert runner.longest <= cell.context == int(cell.name)
        assert runner.longest > cell.context - 8  # a list of words may end a word early


@pytest.mark.parametrize("task", LENGTHLY)
def test_draws_are_a_function_of_the_seed(task: str) -> None:
    def prompts(seed: int) -> list[Any]:
        rng = random.Random(seed)
        if task in ("perplexity", "fidelity"):
            return perplexity.windows(bench(seed=seed), 400)
        if task == "shared_context":
            return [shared_context.shared(bench(), 400, rng)]
        runner = Recorder()
        TASKS[task](bench(seed=seed))[0].measure(runner)
        return runner.asked

    assert prompts(1) == prompts(1)
    assert prompts(1) != prompts(2)


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_needle_stands_at_its_depth(depth: float) -> None:
    one = needle.ask(bytes(1000), 300, depth, random.Random(0), str.encode)
    text = bytes(one.prompt)
    found = text.index(b"\nThe pass key is " + one.references[0].encode())
    room = 300 - len(needle.NEEDLE.format(key="12345")) - len(needle.QUESTION)
    assert found == round(depth * room)
    assert text.endswith(needle.QUESTION.encode())


def test_needles_of_several_depths_keep_their_order_and_the_text_between() -> None:
    prompt = hide(range(100, 200), 60, [(0.75, [1, 1]), (0.25, [2, 2])], [3], random.Random(0))
    assert len(prompt) == 60
    assert prompt[-1] == 3
    assert prompt.index(2) < prompt.index(1)
    text = [token for token in prompt if token >= 100]
    assert text == list(range(text[0], text[0] + 55))


def test_a_prompt_too_short_for_its_needle_is_refused() -> None:
    with pytest.raises(SpecacheError, match="needs at least"):
        TASKS["needle"](bench(lengths=(40,)))


def test_multikey_asks_for_one_of_four_named_keys() -> None:
    one = multikey.ask(bench(), 500, random.Random(0))
    text = bytes(one.prompt).decode()
    keys = dict(re.findall(r"The pass key of (\w+) is (\d{5})\.", text))
    wanted = re.search(r"What is the pass key of (\w+)\?", text)
    assert len(keys) == 4
    assert wanted is not None
    assert keys[wanted[1]] == one.references[0]


def test_variables_are_those_that_an_interpreter_would_find() -> None:
    one = variables.ask(bench(), 600, random.Random(0))
    text = bytes(one.prompt).decode()
    memory: dict[str, str] = {}
    for name, value in re.findall(r"\nVAR (\w+) = (?:VAR )?(\w+)\n", text):
        memory[name] = memory.get(value, value)
    asked = re.search(r"variables have the value (\d+): $", text)
    assert asked is not None
    assert {name for name, value in memory.items() if value == asked[1]} == set(one.references)
    assert len(memory) == 2 * len(one.references)


def test_aggregation_wants_the_three_most_common_words() -> None:
    one = aggregation.ask(bench(), 600, random.Random(0))
    text = bytes(one.prompt).decode()
    words = text.removeprefix(aggregation.OPENING).removesuffix(aggregation.QUESTION).split()
    assert sorted(Counter(words)[word] for word in one.references) == sorted(
        count for _, count in Counter(words).most_common(3)
    )


def test_forced_logits_are_those_of_one_whole_pass(model: Any) -> None:
    """The plain model's own logits for each position, without a cache."""
    ids = torch.randint(0, 256, (2, 90), generator=torch.Generator().manual_seed(0))
    forced = Runner(model, BYTES).forced_logits(ids, 50)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits[:, 50:-1]
    torch.testing.assert_close(forced, whole, atol=2e-4, rtol=1e-4)


def test_perplexity_is_the_exponent_of_the_mean_loss(model: Any) -> None:
    rows = perplexity.windows(bench(samples=3), 80)
    outcome = perplexity.measure(Runner(model, BYTES, batch_size=2), rows)
    with torch.no_grad():
        logits = model(torch.tensor(rows), use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(logits[:, 40:-1].flatten(0, 1), torch.tensor(rows)[:, 41:].flatten())
    assert outcome.score == pytest.approx(losses.exp().item(), rel=1e-4)
    assert outcome.samples == 3 * 39
    weights = torch.tensor([math.log(value) for value in outcome.detail["by_position"].values()])
    assert weights.mean().item() == pytest.approx(losses.item(), rel=0.05)  # stretches of nearly equal length


def test_divergence_is_torchs_kl(model: Any) -> None:
    full, ours = torch.randn(2, 5, 11), torch.randn(2, 5, 11)
    expected = torch.nn.functional.kl_div(
        ours.log_softmax(-1), full.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    torch.testing.assert_close(fidelity.divergence(full, ours), expected)


def test_fidelity_is_total_where_the_method_loses_nothing_and_not_where_it_does(model: Any) -> None:
    rows = perplexity.windows(bench(samples=2), 160)
    lossless = "specache:group_size=32,residual_length=32,top_k=1024,bits=1"
    figures = {}
    for name in ("uncompiled", lossless, "kivi:bits=1,group_size=32,residual_length=1"):
        with running(model, parse_setting(name), "eager"):
            figures[name] = fidelity.measure(Runner(model, BYTES), rows)
    assert figures["uncompiled"].score == figures[lossless].score == 1.0
    assert figures["uncompiled"].detail["kl"] < figures[lossless].detail["kl"] + 1e-6 < 1e-5
    assert list(figures.values())[-1].detail["kl"] > 1e-3
    assert model._compiled_call_impl is None


@pytest.mark.parametrize("compiled", [False, True])
def test_answers_over_a_shared_context_are_those_to_the_whole_prompts(model: Any, compiled: bool) -> None:
    runner = Runner(compile_copy(model, **LOSSLESS) if compiled else model, BYTES)
    rng = random.Random(0)
    context = [rng.randrange(256) for _ in range(120)]
    questions = [[rng.randrange(256) for _ in range(n)] for n in (7, 12)]
    whole = Runner(model, BYTES).answers([[*context, *question] for question in questions], 6)
    assert runner.answers_over(context, questions, 6) == whole


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

    reader = TokenizerReader(Tokenizer())
    assert reader.begin() == [1]
    assert reader.decode(reader.encode("abc")) == "abc"
    runner = Recorder()
    TASKS["needle"](bench(reader=reader, lengths=(300,)))[0].measure(runner)
    assert all(prompt[0] == 1 and prompt.count(b"\x01") == 1 for prompt in runner.asked)


def test_the_library_held_out_is_no_part_of_the_rest() -> None:
    kept, held_out = library_source(held_out=False), library_source(held_out=True)
    assert len(held_out) > 300_000
    assert held_out[:5000] not in kept


def test_text_files_take_the_librarys_place(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab" * 500)
    assert set(bench(texts=(tmp_path / "a.txt",)).haystack) == set(b"ab")


# LongBench and RULER: small files of the same form.


def longbench_files(folder: Path, **datasets: list[dict[str, Any]]) -> Path:
    for name, records in datasets.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "config").mkdir()
    template = "Story: {context}\nQuestion: {input}\nAnswer:"
    (folder / "config" / "dataset2prompt.json").write_text(json.dumps(dict.fromkeys(datasets, template)))
    (folder / "config" / "dataset2maxlen.json").write_text(json.dumps(dict.fromkeys(datasets, 16)))
    return folder


def record(**changes: Any) -> dict[str, Any]:
    return {
        "input": "who?", "context": "a long story", "answers": ["Ada"], "length": 3, "dataset": "x", "language": "en",
        "all_classes": None, "_id": "0", **changes,
    }  # fmt: skip


class Parrot(Recorder):
    """Answers every prompt with one text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def answers(self, prompts: Any, new_tokens: int) -> list[str]:
        super().answers(prompts, new_tokens)
        return [self.text] * len(prompts)


def test_longbench_files_give_a_cell_a_dataset_with_its_prompt_and_metric(tmp_path: Path) -> None:
    folder = longbench_files(
        tmp_path,
        qasper=[record(), record(answers=["Bob", "Ada Lovelace"])],
        trec=[record(answers=["City"], all_classes=["City", "Person"])],
        lcc=[record(answers=["Ada"])],
    )
    cells = {cell.name: cell for cell in TASKS["longbench"](bench(data=folder))}
    assert set(cells) == {"lcc", "qasper", "trec"}
    runner = Parrot("Ada")
    outcome = cells["qasper"].measure(runner)
    assert runner.asked[0] == b"Story: a long story\nQuestion: who?\nAnswer:"
    assert (outcome.metric, outcome.samples) == ("F1", 2)
    assert outcome.score == pytest.approx((1 + 2 / 3) / 2)
    assert cells["lcc"].measure(Parrot("Ada")).score == 1.0
    assert cells["trec"].measure(Parrot("City\nPerson")).score == 1.0


def test_a_longbench_prompt_beyond_the_models_context_loses_its_middle(tmp_path: Path) -> None:
    story = "".join(f"{i:05d}" for i in range(1000))
    cell = TASKS["longbench"](bench(data=longbench_files(tmp_path, qasper=[record(context=story)]), limit=1000))[0]
    runner = Recorder()
    cell.measure(runner)
    assert cell.context == 1000
    assert len(runner.asked[0]) == 1000 - 16
    assert runner.asked[0].startswith(b"Story: 0000000001")
    assert runner.asked[0].endswith(b"00999\nQuestion: who?\nAnswer:")
    assert without_middle(list(range(10)), 5) == [0, 1, 7, 8, 9]


class ChatReader(ByteReader):
    """Bytes, a turn of chat in brackets."""

    def chat(self, text: str) -> list[int]:
        return self.encode(f"<user>{text}</user><model>")


def test_a_chat_template_stands_around_longbench_prompts_but_not_around_code(tmp_path: Path) -> None:
    folder = longbench_files(tmp_path, qasper=[record(context="0123456789" * 100)], lcc=[record()])
    lcc, qasper = TASKS["longbench"](bench(reader=ChatReader(), data=folder, chat=True, limit=500))
    runner = Recorder()
    qasper.measure(runner)
    assert len(runner.asked[0]) == 500 - 16
    assert runner.asked[0].startswith(b"<user>Story: 0123")
    assert runner.asked[0].endswith(b"\nAnswer:</user><model>")
    lcc.measure(runner)
    assert runner.asked[1].startswith(b"Story")
    with pytest.raises(SpecacheError, match="no chat template"):
        TASKS["longbench"](bench(data=folder, chat=True))


def test_ruler_files_give_a_cell_a_task(tmp_path: Path) -> None:
    for task, outputs in (("niah_multivalue", ["111", "222"]), ("qa_1", ["Ada", "Bob"]), ("other", ["x"])):
        (tmp_path / task).mkdir()
        line = {"index": 0, "input": "Find them.", "outputs": outputs, "length": 10}
        (tmp_path / task / "validation.jsonl").write_text(json.dumps(line) + "\n")
    cells = {cell.name: cell for cell in TASKS["ruler"](bench(data=tmp_path))}
    assert set(cells) == {"niah_multivalue", "qa_1"}
    assert cells["niah_multivalue"].measure(Parrot("only 222")).score == 0.5
    assert cells["qa_1"].measure(Parrot("it was bob")).score == 1.0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"input": "x", "context": "y"}', "line 1: field 'answers' is missing or no list"),
        ('{"input": 3, "context": "y", "answers": ["z"]}', "line 1: field 'input' is missing or no str"),
        ('{"input": "x", "context": "y", "answers": []}', "a record has no answers"),
        ("{", "line 1: no JSON"),
        ("[1]", "line 1: field 'input'"),
        ("\n", "holds no records"),
    ],
)
def test_a_malformed_data_file_is_named_with_its_line(tmp_path: Path, content: str, message: str) -> None:
    longbench_files(tmp_path, qasper=[record()])
    (tmp_path / "qasper.jsonl").write_text(content)
    with pytest.raises(SpecacheError, match=re.escape(message)) as error:
        TASKS["longbench"](bench(data=tmp_path))
    assert "qasper.jsonl" in str(error.value)


def test_longbench_without_its_prompts_says_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "qasper.jsonl").write_text(json.dumps(record()))
    with pytest.raises(SpecacheError, match=r"no dataset2prompt\.json"):
        TASKS["longbench"](bench(data=tmp_path))
