"""The tasks of `specache eval`: what their prompts hold, and their figures against plain computations."""

from __future__ import annotations

import json
import math
import random
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import LOSSLESS, byte_tokenizer, compile_copy, tiny_llama
from specache_compile.errors import SpecacheError
from specache_compile.evaluation.reader import Reader
from specache_compile.evaluation.runner import Runner
from specache_compile.evaluation.settings import parse_setting, running
from specache_compile.evaluation.tasks import (
    TASKS,
    needle,
    perplexity,
    shared_context,
)
from specache_compile.evaluation.tasks.haystack import hide, library_source
from specache_compile.evaluation.tasks.prompts import without_middle
from specache_compile.evaluation.tasks.task import Ask, Bench

BYTES = Reader(byte_tokenizer())


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

    def answers_apart(self, prompts: Any, new_tokens: int) -> list[str]:
        """Context and question, a zero between them."""
        return self.answers([[*context, 0, *question] for context, question in prompts], new_tokens)

    def answers_over(self, context: Any, questions: Any, new_tokens: int) -> list[str]:
        return self.answers_apart([(context, question) for question in questions], new_tokens)


def test_prompt_and_answer_fill_the_asked_length_and_no_more() -> None:
    for cell in TASKS["needle"](bench()):
        runner = Recorder()
        assert cell.measure(runner).score == 0.0
        assert len(runner.asked) == 6
        assert runner.longest == cell.context == int(cell.name)


@pytest.mark.parametrize(
    ("task", "length", "told"),
    [("closeness", 25, "is no more than a continuation of 24 and a token"), ("own_output", 120, "too short, -"),
     ("perplexity", 0, "too short, 0 tokens are left")],
)  # fmt: skip
def test_a_context_without_room_for_its_text_is_refused(task: str, length: int, told: str) -> None:
    with pytest.raises(SpecacheError, match=told):
        TASKS[task](bench(lengths=(length,)))


@pytest.mark.quick_for("needle")
@pytest.mark.parametrize("task", ["needle", "shared_context", "perplexity"])
def test_draws_are_a_function_of_the_seed(task: str) -> None:
    def prompts(seed: int) -> list[Any]:
        rng = random.Random(seed)
        if task == "perplexity":
            return bench(seed=seed).windows_apart(400)
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


def test_a_shared_context_has_four_named_keys_each_asked_for() -> None:
    context, asks = shared_context.shared(bench(), 500, random.Random(0))
    keys = dict(re.findall(r"The pass key of (\w+) is (\d{5})\.", bytes(context).decode()))
    assert len(keys) == 4
    wanted = [re.findall(r"What is the pass key of (\w+)\?", bytes(ask.prompt).decode()) for ask in asks]
    assert [(keys[name],) for (name,) in wanted] == [ask.references for ask in asks]


def test_forced_logits_are_those_of_one_whole_pass(model: Any) -> None:
    """The plain model's own logits for each position, without a cache."""
    ids = torch.randint(0, 256, (2, 90), generator=torch.Generator().manual_seed(0))
    forced = Runner(model, BYTES).forced_logits(ids, 50)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits[:, 50:-1]
    torch.testing.assert_close(forced, whole, atol=2e-4, rtol=1e-4)


def test_perplexity_is_the_exponent_of_the_mean_loss(model: Any) -> None:
    rows = bench(samples=3).windows_apart(80)
    outcome = perplexity.measure(Runner(model, BYTES, batch_size=2), rows)
    with torch.no_grad():
        logits = model(torch.tensor(rows), use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(logits[:, 40:-1].flatten(0, 1), torch.tensor(rows)[:, 41:].flatten())
    assert outcome.score == pytest.approx(losses.exp().item(), rel=1e-4)
    assert outcome.samples == 3 * 39
    weights = torch.tensor([math.log(value) for value in outcome.detail["by_position"].values()])
    assert weights.mean().item() == pytest.approx(losses.item(), rel=0.05)  # stretches of nearly equal length
    assert statistics.fmean(outcome.detail["nats"]) == pytest.approx(losses.item(), rel=1e-4)
    assert outcome.detail["recent"] == pytest.approx(outcome.detail["nats"], rel=1e-4)  # all lies within 256 tokens


def test_perplexity_behind_the_last_tokens_alone_is_the_models_on_each_tokens_own_context(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token: what begins a text (two tokens), and the last 16, or up to six more within a stride."""
    monkeypatch.setattr(perplexity, "RECENT", 16)
    monkeypatch.setattr(perplexity, "STRIDE", 7)
    rows = torch.tensor(bench(samples=2).windows_apart(61))
    losses = []
    for place, token in enumerate(range(31, 61)):
        start = token - place % 7 - 16
        with torch.no_grad():
            logits = model(torch.cat([rows[:, :2], rows[:, start:token]], 1), use_cache=False).logits[:, -1]
        losses.append(torch.nn.functional.cross_entropy(logits, rows[:, token], reduction="none"))
    found = perplexity.recent_nats(model, rows, begin=2)
    torch.testing.assert_close(found, torch.stack(losses, 1), atol=1e-4, rtol=1e-4)
    whole = perplexity.measure(Runner(model, BYTES), rows.tolist(), begin=2).detail
    assert whole["recent"] == pytest.approx(found.mean(1).tolist(), rel=1e-5) != whole["nats"]


def test_only_the_uncompiled_model_is_asked_behind_the_last_tokens_alone(model: Any) -> None:
    with running(model, parse_setting("kivi:bits=2,group_size=32,residual_length=32"), "eager"):
        assert "recent" not in perplexity.measure(Runner(model, BYTES), bench(samples=1).windows_apart(80)).detail


@pytest.mark.quick_for("False", slow=("True",))
@pytest.mark.parametrize("compiled", [False, True])
def test_answers_over_a_shared_context_are_those_to_the_whole_prompts(model: Any, compiled: bool) -> None:
    runner = Runner(compile_copy(model, **LOSSLESS) if compiled else model, BYTES)
    rng = random.Random(0)
    context = [rng.randrange(256) for _ in range(120)]
    questions = [[rng.randrange(256) for _ in range(n)] for n in (7, 12)]
    whole = Runner(model, BYTES).answers([[*context, *question] for question in questions], 6)
    assert runner.answers_over(context, questions, 6) == whole
    assert runner.answers_apart([(context, question) for question in questions], 6) == whole


def test_a_context_is_read_before_its_question_is_known(model: Any) -> None:
    """Two of the same lengths in one batch."""
    read: list[tuple[int, ...]] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, given: read.append(tuple((args[0] if args else given["input_ids"]).shape)), with_kwargs=True
    )
    try:
        Runner(model, BYTES).answers_apart([(b"a" * 40, b"why?"), (b"b" * 40, b"who?"), (b"c" * 30, b"what?")], 2)
    finally:
        hook.remove()
    assert read == [(2, 40), (2, 4), (2, 1), (1, 30), (1, 5), (1, 1)]


def test_a_blind_prompt_is_the_same_in_two_parts() -> None:
    joined, parted, short = Recorder(), Recorder(), {"texts": (Path(__file__),)}
    assert "blind" not in TASKS["needle"](bench(**short))[0].measure(joined).metric
    assert TASKS["needle"](bench(**short, blind=True))[0].measure(parted).metric.endswith(", blind")
    assert [prompt.replace(b"\0", b"", 1) for prompt in parted.asked] == joined.asked
    assert all(prompt.split(b"\0")[1].startswith(needle.QUESTION.encode()) for prompt in parted.asked)


def test_a_question_that_cannot_be_told_from_its_context_is_not_asked_blindly() -> None:
    with pytest.raises(ValueError, match="0 of 3 tokens are no question behind a context"):
        _ = Ask(b"abc", ("x",)).apart


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


class ChatReader(Reader):
    """Bytes, a turn of chat in brackets."""

    def chat(self, text: str) -> list[int]:
        return self.encode(f"<user>{text}</user><model>")

    def around(self) -> tuple[list[int], list[int]]:
        return self.encode("<user>"), self.encode("</user><model>")


CHATTING = ChatReader(byte_tokenizer())


def test_a_chat_template_stands_around_longbench_prompts_but_not_around_code(tmp_path: Path) -> None:
    folder = longbench_files(tmp_path, qasper=[record(context="0123456789" * 100)], lcc=[record()])
    lcc, qasper = TASKS["longbench"](bench(reader=CHATTING, data=folder, chat=True, limit=500))
    runner = Recorder()
    qasper.measure(runner)
    assert len(runner.asked[0]) == 500 - 16
    assert runner.asked[0].startswith(b"<user>Story: 0123")
    assert runner.asked[0].endswith(b"\nAnswer:</user><model>")
    lcc.measure(runner)
    assert runner.asked[1].startswith(b"Story")
    with pytest.raises(SpecacheError, match="no chat template"):
        TASKS["longbench"](bench(data=folder, chat=True))


def test_longbench_is_read_blindly_up_to_the_end_of_its_context(tmp_path: Path) -> None:
    """The context alone loses its middle, and a chat's turn stands around both."""
    folder = longbench_files(tmp_path, qasper=[record(context="0123456789" * 100)])
    for reader, limit, expected in (
        (BYTES, 2000, b"Story: " + b"0123456789" * 100 + b"\0\nQuestion: who?\nAnswer:"),
        (CHATTING, 90, b"<user>Story: 012345674567890123456789\0\nQuestion: who?\nAnswer:</user><model>"),
    ):
        runner = Recorder()
        chat = reader is not BYTES
        cell = TASKS["longbench"](bench(reader=reader, data=folder, blind=True, chat=chat, limit=limit))[0]
        cell.measure(runner)
        assert runner.asked == [expected]
        assert len(expected) - 1 + 16 == cell.context <= limit
    (folder / "config" / "dataset2prompt.json").write_text(json.dumps({"qasper": "{input}: {context}."}))
    with pytest.raises(SpecacheError, match="qasper: its prompt does not have the question behind the context"):
        TASKS["longbench"](bench(data=folder, blind=True))


def ruler_file(folder: Path, task: str, **fields: Any) -> None:
    (folder / task).mkdir()
    line = {"index": 0, "input": "Find them.", "outputs": ["x"], "length": 10, **fields}
    (folder / task / "validation.jsonl").write_text(json.dumps(line) + "\n")


def test_ruler_is_read_blindly_up_to_its_last_line(tmp_path: Path) -> None:
    ruler_file(tmp_path, "vt", input="Follow them.\nVAR A = 1\nQuestion: Which are 1?", answer_prefix=" They are: ")
    runner = Recorder()
    TASKS["ruler"](bench(data=tmp_path, blind=True))[0].measure(runner)
    assert runner.asked == [b"Follow them.\nVAR A = 1\0\nQuestion: Which are 1? They are: "]
    for text in ("Which are 1?", "VAR A = 1\nWhich?\n<|assistant|>\n"):
        line = {"input": text, "outputs": ["x"]}
        (tmp_path / "vt" / "validation.jsonl").write_text(json.dumps(line))
        with pytest.raises(SpecacheError, match=r"vt.validation\.jsonl: an input's last line is not its question"):
            TASKS["ruler"](bench(data=tmp_path, blind=True))


def test_ruler_files_give_a_cell_a_task(tmp_path: Path) -> None:
    for task, outputs in (("niah_multivalue", ["111", "222"]), ("qa_1", ["Ada", "Bob"]), ("other", ["x"])):
        ruler_file(tmp_path, task, outputs=outputs)
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


# LongBench v2 and SCBench: likewise.


TEMPLATE = "<text>$DOC$</text>\nQ: $Q$\n(A) $C_A$\n(B) $C_B$\n(C) $C_C$\n(D) $C_D$\n"


def choice(**changes: Any) -> dict[str, Any]:
    return {
        "_id": "0", "domain": "Code", "sub_domain": "x", "difficulty": "easy", "length": "short", "question": " who? ",
        "choice_A": "Ada", "choice_B": "Bob", "choice_C": "$Q$", "choice_D": "Eve", "answer": "A", "context": "a story",
        **changes,
    }  # fmt: skip


def longbench_v2_files(folder: Path, records: Any) -> Path:
    (folder / "data.json").write_text(json.dumps(records))
    (folder / "prompts").mkdir()
    (folder / "prompts" / "0shot.txt").write_text(TEMPLATE)
    return folder


def test_longbench_v2_gives_a_cell_a_length_with_its_prompt_and_the_letters_share(tmp_path: Path) -> None:
    records = [
        choice(), choice(answer="B", difficulty="hard"), choice(answer="A", difficulty="hard", domain="Law"),
        choice(length="long"),
    ]  # fmt: skip
    cells = {cell.name: cell for cell in TASKS["longbench_v2"](bench(data=longbench_v2_files(tmp_path, records)))}
    assert list(cells) == ["short", "long"]
    runner = Parrot("The correct answer is **(A)**.")
    found = cells["short"].measure(runner)
    assert runner.asked[0] == b"<text>a story</text>\nQ: who?\n(A) Ada\n(B) Bob\n(C) $Q$\n(D) Eve\n"
    assert (found.metric, found.samples, found.score) == ("accuracy", 3, 2 / 3)
    assert found.detail["by_difficulty"] == {"easy": 1.0, "hard": 0.5}
    assert found.detail["by_domain"] == {"Code": 0.5, "Law": 1.0}
    for text, score in (("The correct answer is A", 1.0), ("A", 0.0), ("The correct answer is B, not (A)", 0.0)):
        assert cells["long"].measure(Parrot(text)).score == score


def test_longbench_v2_cuts_its_text_alone_and_reads_it_blindly_alone(tmp_path: Path) -> None:
    folder = longbench_v2_files(tmp_path, [choice(context="0123456789" * 100)])
    (cell,) = TASKS["longbench_v2"](bench(data=folder, limit=240, blind=True, samples=1))
    runner = Recorder()
    cell.measure(runner)
    context, question = runner.asked[0].split(b"\0")
    assert cell.context == 240 == len(context) + len(question) + 128
    assert (context[:16], context[-4:]) == (b"<text>0123456789", b"6789")
    assert question.startswith(b"</text>\nQ: who?")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([choice(), choice(answer="E")], "record 2: field 'answer' is 'E', and none of A, B, C, D"),
        ([choice(length="huge")], "record 1: field 'length' is 'huge', and none of short, medium, long"),
        ([choice(choice_C=3)], "record 1: field 'choice_C' is missing or no str"),
        (choice(), "a JSON array of records is wanted"),
        ([], "holds no records"),
    ],
)
def test_a_bad_longbench_v2_file_is_named_with_its_record(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(SpecacheError, match=re.escape(message)) as error:
        TASKS["longbench_v2"](bench(data=longbench_v2_files(tmp_path, content)))
    assert "data.json" in str(error.value)


def test_longbench_v2_wants_its_prompt(tmp_path: Path) -> None:
    folder = longbench_v2_files(tmp_path, [choice()])
    (folder / "prompts" / "0shot.txt").write_text("Q: $Q$ $DOC$")
    with pytest.raises(SpecacheError, match=r"0shot\.txt: a prompt has each of .* once, \$DOC\$ first"):
        TASKS["longbench_v2"](bench(data=folder))
    (folder / "prompts" / "0shot.txt").unlink()
    with pytest.raises(SpecacheError, match=r"no 0shot\.txt in .* copy it from LongBench's repository"):
        TASKS["longbench_v2"](bench(data=folder))
    (folder / "data.json").unlink()
    with pytest.raises(SpecacheError, match=r"no LongBench v2 file in .*: wanted is data\.json"):
        TASKS["longbench_v2"](bench(data=folder))


def turns(*pairs: tuple[str, Any], **more: Any) -> list[dict[str, Any]]:
    return [{"input": question, "answer": answer, **more} for question, answer in pairs]


def scbench_file(folder: Path, name: str, *records: dict[str, Any]) -> Path:
    lines = "\n\n".join(json.dumps({"id": i, **record}) for i, record in enumerate(records))
    (folder / f"{name}.jsonl").write_text(lines)
    return folder


def test_scbench_asks_each_question_of_a_shared_context(tmp_path: Path) -> None:
    """As many contexts as bring the samples that are wanted."""
    one = {"context": "k: v", "multi_turns": turns(("k?", "v"), ("l?", "w"))}
    folder = scbench_file(tmp_path, "scbench_kv", one, {**one, "context": "l: w"}, one)
    scbench_file(tmp_path, "scbench_repoqa", one)
    (cell,) = TASKS["scbench"](bench(data=folder, samples=3))
    runner = Parrot("is v")
    found = cell.measure(runner)
    assert runner.asked == [b"k: v\0\n\nk?", b"k: v\0\n\nl?", b"l: w\0\n\nk?", b"l: w\0\n\nl?"]
    assert (cell.name, found.metric, found.score, found.samples) == ("kv", "values found", 0.5, 4)
    assert [each["turn"] for each in found.detail["each"]] == [1, 2, 1, 2]


@pytest.mark.parametrize(
    ("name", "turn", "answer", "score"),
    [
        ("scbench_vt", {"answer": ["AB", "CD"]}, "ab", 0.5),
        ("scbench_qa_eng", {"answer": "the red fox"}, "A fox.", 2 / 3),
        ("scbench_choice_eng", {"answer": "fox", "options": ["cat", "fox", "cow", "dog"]}, "B. fox", 1.0),
        ("scbench_choice_eng", {"answer": "C", "options": ["cat", "fox", "cow", "dog"]}, "B. fox", 0.0),
        ("scbench_many_shot", {"answer": "(B)"}, "It is (B)", 1.0),
        ("scbench_mf", {"answer": 17}, "17.5, or 3", 1.0),
        ("scbench_prefix_suffix", {"answer": "aBc"}, "abc", 0.0),
    ],
)
def test_scbench_scores_an_answer_as_its_dataset_does(
    tmp_path: Path, name: str, turn: dict[str, Any], answer: str, score: float
) -> None:
    folder = scbench_file(tmp_path, name, {"context": [1, 2], "multi_turns": [{"input": "?", **turn}]})
    runner = Parrot(answer)
    assert TASKS["scbench"](bench(data=folder))[0].measure(runner).score == pytest.approx(score)
    options = b"\nA. cat\nB. fox\nC. cow\nD. dog\nAnswer: " if "options" in turn else b""
    assert runner.asked == [b"[1, 2]\0\n\n?" + options]


@pytest.mark.parametrize(
    ("name", "record", "message"),
    [
        ("scbench_kv", {"multi_turns": turns(("k?", "v"))}, "line 3: field 'context' is missing or no str or list"),
        ("scbench_kv", {"context": "x", "multi_turns": []}, "line 3: field 'multi_turns' is empty"),
        ("scbench_kv", {"context": "x", "multi_turns": [{"input": "k?"}]}, "line 3, turn 1: field 'answer' is missing"),
        ("scbench_kv", {"context": "x", "multi_turns": turns(("k?", ""))}, "line 3, turn 1: field 'answer' is empty"),
        (
            "scbench_choice_eng", {"context": "x", "multi_turns": turns(("k?", "E"), options=["a", "b", "c", "d"])},
            "line 3, turn 1: field 'answer' is 'E', and neither a letter nor one of the options",
        ),
        (
            "scbench_choice_eng", {"context": "x", "multi_turns": turns(("k?", "A"), options=["a"])},
            "line 3, turn 1: field 'options' has 1 entries, not 4",
        ),
        ("scbench_other", {"context": "x", "multi_turns": []}, "no SCBench file in"),
    ],
)  # fmt: skip
def test_a_bad_scbench_file_is_named_with_its_line_and_turn(
    tmp_path: Path, name: str, record: dict[str, Any], message: str
) -> None:
    good = {"context": "x", "multi_turns": turns(("k?", "A"), options=["a", "b", "c", "d"])}
    with pytest.raises(SpecacheError, match=re.escape(message)):
        TASKS["scbench"](bench(data=scbench_file(tmp_path, name, good, record)))
