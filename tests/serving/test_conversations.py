"""Which conversation a prompt goes on from, what is kept, and what is left on disk."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM, Qwen3NextConfig

from conftest import compile_copy, compiled_with, prompt
from families import FAMILIES
from specache_compile import SpecacheError
from specache_compile.compat import with_cache
from specache_compile.serving.conversation import Conversation, bytes_of
from specache_compile.serving.conversations import Bounds, Conversations
from specache_compile.serving.session_folder import SessionFolder

pytestmark = pytest.mark.one_process

PLENTY = Bounds(conversations=8, host_bytes=1 << 40, device_bytes=1 << 40)
EVICTING = {"method": "h2o", "budget": 0.5, "lowering": "eager"}


def keeping(model: Any, bounds: Bounds = PLENTY, folder: Path | None = None, disk: int = 1 << 40) -> Conversations:
    return Conversations(model, bounds, folder and SessionFolder(folder, disk), evicted.append)


evicted: list[str] = []


@pytest.fixture(autouse=True)
def nothing_is_evicted_yet() -> None:
    evicted.clear()


@torch.no_grad()
def hold(kept: Conversations, ids: torch.Tensor) -> Conversation:
    """Have a conversation of these tokens kept, as if a request had been all of them."""
    cache = DynamicCache(config=kept.model.config)
    kept.model(ids[None], **with_cache(cache), use_cache=True)
    conversation = Conversation(ids, cache, request_length=len(ids))
    kept.put(conversation)
    kept.trim()
    return conversation


@torch.no_grad()
def next_logits(model: Any, ids: torch.Tensor, conversation: Conversation | None = None) -> torch.Tensor:
    """After all of `ids`, of which a conversation holds the first."""
    held = 0 if conversation is None else len(conversation.ids)
    cache = None if conversation is None else conversation.cache
    return model(ids[None, held:], **with_cache(cache), use_cache=True).logits[0, -1]


def test_the_longest_beginning_is_taken_and_gone_on_from(compiled: LlamaForCausalLM, llama: LlamaForCausalLM) -> None:
    kept, ids = keeping(compiled), prompt(120)[0]
    hold(kept, ids[:70])
    longer = hold(kept, ids[:90])
    taken = kept.take(ids)
    assert taken is longer
    assert len(kept.in_memory) == 1
    torch.testing.assert_close(next_logits(compiled, ids, taken), next_logits(llama, ids), rtol=1e-4, atol=1e-4)


def test_a_repeated_last_turn_is_cut_to_all_but_its_last_token(
    compiled: LlamaForCausalLM, llama: LlamaForCausalLM
) -> None:
    kept, ids = keeping(compiled), prompt(90)[0]
    hold(kept, ids)
    taken = kept.take(ids)
    assert len(taken.ids) == taken.cache.get_seq_length() == 89
    torch.testing.assert_close(next_logits(compiled, ids, taken), next_logits(llama, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("common", "held"), [(70, 70), (40, 0)])
def test_who_begins_alike_has_a_copy_where_half_of_it_is_of_use(
    compiled: LlamaForCausalLM, common: int, held: int
) -> None:
    kept = keeping(compiled)
    ids = prompt(120)[0]
    first = hold(kept, ids)
    other = torch.cat([ids[:common], prompt(50, seed=7)[0]])
    other[common] = (ids[common] + 1) % 128
    taken = kept.take(other)
    assert len(taken.ids) == taken.cache.get_seq_length() == held
    assert kept.in_memory == [first]
    assert kept.take(torch.cat([ids, ids[:1]])) is first
    assert first.cache.get_seq_length() == 120


def test_another_question_behind_one_system_prompt_leaves_the_session_where_it_is(compiled: LlamaForCausalLM) -> None:
    """However short it is. The same question again, or a turn that leaves an empty thought out, takes it."""
    kept, ids, other = keeping(compiled), prompt(100)[0], prompt(30, seed=7)[0]
    other[:] = (ids[70:100] + 1) % 128
    first = hold(kept, ids)
    first.request_length = 74
    taken = kept.take(torch.cat([ids[:70], other]))
    assert len(taken.ids) == 70
    assert kept.in_memory == [first]
    assert kept.take(torch.cat([ids[:74], other])) is first


def test_many_short_questions_keep_as_many_sessions_as_there_is_room_for(llama: LlamaForCausalLM) -> None:
    kept, system = keeping(llama, Bounds(4, 1 << 40, 1 << 40)), prompt(60)[0]
    for question in range(12):
        ids = torch.cat([system, torch.tensor([question, 5])])
        conversation = kept.take(ids)
        assert len(conversation.ids) == (60 if question else 0)
        with torch.no_grad():
            llama(ids[None, len(conversation.ids) :], **with_cache(conversation.cache), use_cache=True)
        conversation.ids, conversation.request_length = ids, 61
        kept.put(conversation)
        kept.trim()
    assert [int(conversation.ids[60]) for conversation in kept.in_memory] == [8, 9, 10, 11]


def test_what_cannot_be_cut_is_gone_on_from_whole_or_not_at_all(llama: LlamaForCausalLM) -> None:
    """Under eviction, pairs of tokens that are still needed may be gone."""
    kept, ids = keeping(compiled_with(llama, EVICTING)), prompt(90)[0]
    whole = hold(kept, ids[:80])
    assert len(kept.take(ids[:75]).ids) == 0
    assert kept.take(ids) is whole


def test_nor_is_a_window_that_has_passed_over_tokens() -> None:
    family = next(family for family in FAMILIES if family.name == "gemma2")
    kept = keeping(compiled_with(family.model(), {"lowering": "eager"}))
    ids = prompt(60)[0]
    whole = hold(kept, ids)
    assert not whole.crops
    assert len(kept.take(ids).ids) == 0
    assert kept.take(torch.cat([ids, ids[:1]])) is whole


def test_the_least_recently_used_one_goes_first(compiled: LlamaForCausalLM) -> None:
    """By number, and by bytes; without a folder, for good."""
    kept = keeping(compiled, Bounds(2, 1 << 40, 1 << 40))
    first, second = (hold(kept, prompt(40, seed=seed)[0]) for seed in (2, 3))
    kept.put(kept.take(torch.cat([first.ids, second.ids[:1]])))
    third = hold(kept, prompt(40, seed=4)[0])
    assert kept.in_memory == [first, third]
    kept.bounds = Bounds(2, bytes_of(third.cache)["host"], 0)
    kept.put(kept.take(torch.cat([third.ids, second.ids[:1]])))
    kept.trim()
    assert kept.in_memory == [third]
    assert evicted == ["nowhere"] * 2


def test_the_one_that_runs_is_among_those_that_memory_has_room_for(compiled: LlamaForCausalLM) -> None:
    kept = keeping(compiled, Bounds(1, 1 << 40, 1 << 40))
    first = hold(kept, prompt(40)[0])
    assert kept.take(torch.cat([first.ids, first.ids[:1]])) is first
    assert evicted == []
    kept.put(first)
    kept.take(prompt(40, seed=2)[0])
    assert kept.in_memory == []


def test_a_folder_has_a_bound_and_outlives_its_server(compiled: LlamaForCausalLM, tmp_path: Path) -> None:
    kept = keeping(compiled, folder=tmp_path)
    texts = [prompt(60, seed=seed)[0] for seed in (2, 3, 4)]
    for ids in texts:
        hold(kept, ids)
    with pytest.raises(SpecacheError, match="another server uses this folder"):
        keeping(compiled, folder=tmp_path)
    kept.close()
    assert evicted == ["disk"] * 3
    one = kept.on_disk[0].nbytes
    later = keeping(compiled, folder=tmp_path, disk=2 * one + one // 2)
    assert [saved.ids.tolist() for saved in later.on_disk] == [ids.tolist() for ids in texts[1:]]
    assert len(list(tmp_path.glob("session-*"))) == 2
    taken = later.take(torch.cat([texts[2], texts[0][:1]]))
    assert len(taken.ids) == taken.cache.get_seq_length() == 60
    assert len(later.on_disk) == len(list(tmp_path.glob("session-*"))) == 1


@pytest.mark.parametrize("way", ["cut short", "no tokens", "other options", "other version"])
def test_an_unreadable_session_is_prefilled_again(
    compiled: LlamaForCausalLM, llama: LlamaForCausalLM, tmp_path: Path, way: str, logged: list[str]
) -> None:
    kept, ids = keeping(compiled, folder=tmp_path), prompt(60)[0]
    hold(kept, ids)
    kept.close()
    session = kept.on_disk[0].folder
    if way == "cut short":
        tensors = next(session.rglob("layer-000.safetensors"))
        tensors.write_bytes(tensors.read_bytes()[:-8])
    if way == "other version":
        header = json.loads((session / "session.json").read_text())
        header["options"]["options"]["an option of then"] = 1
        (session / "session.json").write_text(json.dumps(header))
    if way == "no tokens":
        (session / "tokens.json").write_text(json.dumps({"asked": 3}))
    model = compile_copy(llama, top_k=8) if way == "other options" else compiled
    later = keeping(model, folder=tmp_path)
    if way == "no tokens":
        assert later.on_disk == []
        assert len(later.take(ids).ids) == 0
    else:
        assert len(later.take(ids).ids) == 0
        assert "the next turn of its conversation is prefilled whole" in str(logged)
    assert not session.exists()


def test_what_else_a_folder_has_stays(tmp_path: Path) -> None:
    notes = tmp_path / "session-notes" / "monday.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    SessionFolder(tmp_path, 0).close()
    assert notes.read_text() == "mine"


def test_what_memory_is_too_short_to_save_is_dropped_too(
    compiled: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    def fail(*given: Any) -> None:
        raise RuntimeError("can't allocate memory")

    kept = keeping(compiled, folder=tmp_path)
    hold(kept, prompt(40)[0])
    monkeypatch.setattr("specache_compile.serving.session_folder.save", fail)
    kept.close()
    assert "can't allocate memory" in str(logged)
    assert kept.in_memory == kept.on_disk == []


def test_states_of_linear_attention_are_counted() -> None:
    layers = ["linear_attention", "full_attention"]
    cache = DynamicCache(config=Qwen3NextConfig(num_hidden_layers=2, layer_types=layers))
    cache.layers[0].update_conv_state(torch.zeros(1, 4, 16))
    cache.layers[1].update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16))
    assert bytes_of(cache) == {"host": 4 * (4 * 16 + 2 * 2 * 3 * 16), "device": 0}


def test_what_cannot_be_saved_is_dropped_with_a_warning(
    compiled: LlamaForCausalLM, tmp_path: Path, logged: list[str]
) -> None:
    kept = keeping(compiled, folder=tmp_path / "sessions")
    hold(kept, prompt(40)[0])
    kept.folder.root = tmp_path / "a file"
    kept.folder.root.write_text("")
    kept.close()
    assert "is not kept" in str(logged)
    assert evicted == ["nowhere"]


@torch.no_grad()
def test_a_change_of_the_weights_forgets_conversations(
    compiled: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    """In memory, on disk, and under way at the change."""
    monkeypatch.setitem(compiled.model._modules, "norm", copy.deepcopy(compiled.model.norm))
    ids, others, weight = prompt(90)[0], prompt(90, seed=2)[0], compiled.model.norm.weight
    kept = keeping(compiled, Bounds(1, 1 << 40, 1 << 40), tmp_path)
    hold(kept, others[:70])
    hold(kept, ids[:70])
    assert evicted == ["disk"]
    under_way = kept.take(ids)
    assert len(under_way.ids) == 70
    kept.put(under_way)
    weight.data.mul_(2.0)
    assert len(kept.take(others).ids) == 0
    assert "made with another model: 1 of" in str(logged)
    assert evicted == ["disk", "nowhere"]
    under_way = kept.take(ids)
    assert len(under_way.ids) == 0
    weight.data.mul_(2.0)
    kept.take(others)
    kept.put(under_way)
    assert kept.in_memory == []


@torch.no_grad()
def test_all_conversations_are_forgotten_on_request(compiled: LlamaForCausalLM, tmp_path: Path) -> None:
    kept, ids = keeping(compiled, Bounds(1, 1 << 40, 1 << 40), tmp_path), prompt(90)[0]
    hold(kept, ids[:40])
    hold(kept, ids[:70])
    under_way = kept.take(ids)
    hold(kept, ids[:60])
    assert len(kept.on_disk) == len(kept.in_memory) == 1
    kept.forget()
    kept.put(under_way)
    assert kept.on_disk == kept.in_memory == list(tmp_path.glob("session-*")) == []
    assert len(kept.take(ids).ids) == 0
