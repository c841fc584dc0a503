"""The constraint of an answer survives tokens that a draft proposes and the answer never has."""

from __future__ import annotations

import json
from typing import Any

import llguidance.hf
import pytest
import torch

from conftest import byte_tokenizer
from specache_compile.serving.structured import Constraint, matcher_of, of_schema

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
ANSWER = '{"city":"Rome"}'


def allowed(constraint: Constraint, ids: list[int], vocabulary: int) -> list[int]:
    """The tokens that may follow these."""
    scores = constraint(torch.tensor([ids]), torch.zeros(1, vocabulary))
    return scores[0].isfinite().nonzero().flatten().tolist()


@pytest.fixture
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture
def constraint(tokenizer: Any) -> Constraint:
    grammar = llguidance.hf.from_tokenizer(tokenizer, n_vocab=len(tokenizer), eos_token=2)
    return Constraint(matcher_of(grammar, of_schema(SCHEMA)), 0, -(-len(tokenizer) // 32))


def test_only_tokens_of_the_schema_are_allowed_up_to_its_end(tokenizer: Any, constraint: Constraint) -> None:
    ids = tokenizer(ANSWER, add_special_tokens=False)["input_ids"]
    for place, token in enumerate(ids):
        assert token in allowed(constraint, ids[:place], len(tokenizer))
    assert allowed(constraint, ids, len(tokenizer)) == [2]
    assert json.loads(tokenizer.decode(ids)) == {"city": "Rome"}


@pytest.mark.parametrize(("place", "drafted"), [(5, list(b"!")), (5, list(b'{"town"')), (len(ANSWER), [2, 2])])
def test_a_refused_draft_leaves_the_constraint_as_it_was(
    tokenizer: Any, constraint: Constraint, place: int, drafted: list[int]
) -> None:
    """Also one behind the end. A token's id is its byte."""
    ids = tokenizer(ANSWER, add_special_tokens=False)["input_ids"]
    before = allowed(constraint, ids[:place], len(tokenizer))
    with pytest.raises(RuntimeError, match="outside the grammar"):
        allowed(constraint, ids[:place] + drafted, len(tokenizer))
    assert allowed(constraint, ids[:place], len(tokenizer)) == before
    assert allowed(constraint, ids[:-1], len(tokenizer)) == [ids[-1]]
    assert allowed(constraint, ids, len(tokenizer)) == [2]
