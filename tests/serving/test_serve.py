"""`specache serve` with OpenAI's own client; answers are the uncompiled model's."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import openai
import pytest
import torch
from transformers import LlamaForCausalLM

import specache_compile as sc
from conftest import NEEDLE_LLAMA, eager, tiny_llama
from families import LONG_ROPE
from served import Served, answer, chat_once, figures, grown, prompt_of, serving, wait_for, write_checkpoint
from specache_compile.batching.request import End
from specache_compile.cli import main
from specache_compile.serving.generation import Generation
from specache_compile.serving.metrics import Metrics

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


def test_a_next_turn_goes_on_from_its_session(served: Served, uncompiled: LlamaForCausalLM) -> None:
    """All that it shares with the turn before is reused, the reply but for its last token too."""
    messages = [{"role": "user", "content": "A long text about caches. " * 6}]
    first = chat_once(served, messages)
    seen = len(prompt_of(messages)) + 7
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And shorter?"}]
    before = figures(served)
    assert chat_once(served, messages) == answer(uncompiled, prompt_of(messages), 8)
    assert grown(served, before, "specache_prompt_tokens_total reused") == seen
    assert grown(served, before, "specache_prompt_tokens_total computed") == len(prompt_of(messages)) - seen
    assert grown(served, before, "specache_generated_tokens_total") == 8
    assert grown(served, before, "specache_sessions memory") == 0


def test_who_gives_no_seed_does_not_draw_on_from_anothers(served: Served) -> None:
    drawn = set()
    for _ in range(2):
        served.complete("Draw. " * 8, 12, temperature=2, seed=1)
        drawn.add(served.complete("Draw. " * 8, 12, temperature=2).choices[0].text)
    assert len(drawn) == 2


def test_next_to_no_temperature_is_greedy(served: Served, uncompiled: LlamaForCausalLM) -> None:
    """Divided by it, logits would be infinite: on a GPU that ends the process's use of it."""
    said = served.complete("Cold. " * 8, 6, temperature=1e-40)
    assert said.choices[0].text == answer(uncompiled, "Cold. " * 8, 6)


def test_sessions_go_to_disk_least_recently_used_first(
    checkpoint: Path, uncompiled: LlamaForCausalLM, tmp_path: Path
) -> None:
    talks = [[{"role": "user", "content": letter * 80}] for letter in "xyz"]
    with serving(checkpoint, "--sessions", "2", "--session-folder", str(tmp_path)) as served:
        for messages in talks:
            messages.append({"role": "assistant", "content": chat_once(served, messages)})
        now = figures(served)
        assert (now["specache_sessions memory"], now["specache_sessions disk"]) == (2, 1)
        talks[0].append({"role": "user", "content": "More."})
        assert chat_once(served, talks[0]) == answer(uncompiled, prompt_of(talks[0]), 8)
        assert grown(served, now, "specache_prompt_tokens_total computed") < 60
        assert figures(served)["specache_evicted disk"] == 2
    assert not list(tmp_path.iterdir())


def test_requests_wait_are_refused_and_end_when_their_client_leaves(checkpoint: Path) -> None:
    with serving(checkpoint, "--queue", "1", "--rows", "1") as served:
        endless = served.complete("Go on. " * 9, 1900, stream=True)
        next(iter(endless))
        second: list[str] = []
        messages = [{"role": "user", "content": "next"}]
        waiting = threading.Thread(target=lambda: second.append(chat_once(served, messages)))
        waiting.start()
        wait_for(served, "specache_queue", 1)
        with pytest.raises(openai.InternalServerError, match="1 requests are waiting") as refused:
            served.complete("third", 1)
        assert refused.value.status_code == 503
        endless.close()
        waiting.join()
        assert len(second[0]) == 8
        served.complete("Go on. " * 9, 2)  # compiles what the next one runs
        before = figures(served)
        assert before["specache_generated_tokens_total"] < 1900
        with pytest.raises(openai.APITimeoutError):
            served.complete("Go on. " * 9, 1900, timeout=1)
        wait_for(served, "specache_left_total", 2)
        wait_for(served, "specache_running", 0)
        assert 0 < grown(served, before, "specache_generated_tokens_total") < 1900


def test_answers_are_made_together_and_each_ends_by_itself(
    checkpoint: Path, served: Served, uncompiled: LlamaForCausalLM
) -> None:
    """Two that do not end, and short ones beside them; a seed holds beside others."""
    drawn: dict[str, Any] = {"temperature": 1, "seed": 5}
    alone = served.complete("Draw. " * 5, 8, **drawn).choices[0].text
    endless = [served.complete(letter * 40, 1500, stream=True) for letter in "xy"]
    for stream in endless:
        next(iter(stream))
    messages = [{"role": "user", "content": "and besides"}]
    assert chat_once(served, messages) == answer(uncompiled, prompt_of(messages), 8)
    assert served.complete("Draw. " * 5, 8, **drawn).choices[0].text == alone
    assert figures(served)["specache_running"] >= 2
    for stream in endless:
        stream.close()
    wait_for(served, "specache_running", 0)


def test_a_longest_answer_ends_at_the_models_context(served: Served) -> None:
    assert served.complete("a" * 2040).usage.completion_tokens == 8


def test_it_listens_on_this_machine_alone(served: Served) -> None:
    port = int(served.url.rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 1)
    request = urllib.request.Request(f"{served.url}/v1/models", headers={"Host": "elsewhere.example"})
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(request)
    assert [model.id for model in served.client.models.list()] == [served.name]


def test_it_answers_at_whichever_address_of_this_machine_it_listens(checkpoint: Path) -> None:
    with serving(checkpoint, "--host", "127.0.0.9") as served:
        assert "127.0.0.9" in served.url
        assert [model.id for model in served.client.models.list()] == [served.name]


def test_a_checkpoints_own_code_is_not_loaded(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "with code")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert main(["serve", str(folder), "--port", "0"]) == 2
    assert "specache: " in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_an_answer_that_fails_has_an_error_and_the_next_one_has_none(checkpoint: Path, tmp_path: Path) -> None:
    """In a stream too, which has begun by then. A conversation that was to go on too long is there
    as it was."""
    with serving(checkpoint, "--host-memory", "650000", "--session-folder", str(tmp_path)) as served:
        with pytest.raises(openai.BadRequestError, match="a request of 902 tokens needs 4 pages"):
            served.complete("a" * 900, 2)
        with pytest.raises(openai.APIError, match="a request of 902 tokens needs 4 pages"):
            list(served.complete("a" * 900, 2, stream=True))
        assert figures(served)["specache_requests_total 400"] == 1
        assert served.complete("a" * 90, 2).usage.completion_tokens == 2
        with pytest.raises(openai.BadRequestError, match="a request of 902 tokens needs 4 pages"):
            served.complete("a" * 900, 2)
        before = figures(served)
        served.complete("a" * 100, 2)
        assert grown(served, before, "specache_prompt_tokens_total reused") == 90
        with ThreadPoolExecutor() as clients:  # together they need more pages than there are
            answers = list(clients.map(lambda letter: served.complete(letter * 250, 20), "bcd"))
        assert [one.usage.completion_tokens for one in answers] == [20] * 3


def test_an_answer_ends_before_the_models_rope_changes(tmp_path: Path) -> None:
    checkpoint, rope = write_checkpoint(tmp_path), {**LONG_ROPE, "original_max_position_embeddings": 64}
    tiny_llama(max_position_embeddings=2048, rope_parameters=rope).save_pretrained(checkpoint)
    with serving(checkpoint) as served:
        assert served.complete("a" * 40).usage.completion_tokens == 24
        with pytest.raises(openai.BadRequestError, match="40 prompt and 26 new tokens: beyond 64 tokens"):
            served.complete("a" * 40, 26)
        assert served.complete("a" * 65, 3).usage.completion_tokens == 3


def test_a_batch_that_fails_in_every_step_ends_its_answers_and_does_not_turn_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed: list[Exception] = []
    batch = sc.Batch(eager(tiny_llama()), rows=2)
    generation = Generation(None, batch, Metrics(), 100, 2)
    generation.running = {
        batch.add(torch.arange(10 + i), max_new_tokens=4): Mock(left=threading.Event(), end=failed.append)
        for i in range(2)
    }
    for name in ("step", "remove"):
        monkeypatch.setattr(batch, name, Mock(side_effect=RuntimeError("the device is lost")))
    generation.turn()
    assert [str(error) for error in failed] == ["the device is lost"] * 2
    assert not generation.running


def test_a_server_that_stops_writes_no_caches_to_disk(tmp_path: Path) -> None:
    batch = sc.Batch(eager(tiny_llama(num_hidden_layers=1)), sessions=1, spill_folder=tmp_path)
    generation = Generation(None, batch, Metrics(), 100, 2)
    requests = [batch.add(torch.arange(first, 30), max_new_tokens=9) for first in (0, 1)]
    generation.running = {request: Mock(left=threading.Event()) for request in requests}
    while len(batch.decoding) < 2:
        batch.step()
    evicted = Counter(batch.memory.prefixes.evicted)
    generation.stop()
    assert [request.end for request in requests] == [End.REMOVED] * 2
    assert batch.memory.prefixes.evicted == evicted
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_bytes_completes_and_has_no_chat() -> None:
    filler = "def nothing():\n    return None\n" * 6
    prompt = f"{filler}\nThe pass key is 40712. Remember it.\n{filler}\nWhat is the pass key? The pass key is "
    with serving(NEEDLE_LLAMA) as served:
        assert served.complete(prompt, 5).choices[0].text == "40712"
        with pytest.raises(openai.BadRequestError, match=r"has no chat template\. Use /v1/completions"):
            chat_once(served, [{"role": "user", "content": prompt}])
