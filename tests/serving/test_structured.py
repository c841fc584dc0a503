"""The constraint of an answer allows the tokens of its grammar alone."""

from __future__ import annotations

import json

import llguidance.hf
import pytest
import torch

from conftest import byte_tokenizer
from served import one_of
from specache_compile.serving.processors import Constraint

TOKENIZER = byte_tokenizer()
ANSWER = '{"city":"Rome"}'


def allowed(constraint: Constraint, ids: list[int], vocabulary: int) -> list[int]:
    """The tokens that may follow these."""
    scores = constraint(torch.tensor([ids]), torch.zeros(1, vocabulary))
    return scores[0].isfinite().nonzero().flatten().tolist()


@pytest.fixture
def constraint() -> Constraint:
    grammar = llguidance.hf.from_tokenizer(TOKENIZER, n_vocab=len(TOKENIZER), eos_token=2)
    schema = {"x-guidance": {"whitespace_flexible": False}, **one_of(city=["Rome", "Oslo"])}
    return Constraint(grammar, llguidance.LLMatcher.grammar_from_json_schema(schema), 0)


def test_only_tokens_of_the_schema_are_allowed_up_to_its_end(constraint: Constraint) -> None:
    ids = TOKENIZER(ANSWER, add_special_tokens=False)["input_ids"]
    for place, token in enumerate(ids):
        assert token in allowed(constraint, ids[:place], len(TOKENIZER))
    assert allowed(constraint, ids, len(TOKENIZER)) == [2]
    assert json.loads(TOKENIZER.decode(ids)) == {"city": "Rome"}


def test_a_token_outside_of_the_grammar_raises(constraint: Constraint) -> None:
    with pytest.raises(RuntimeError, match="llguidance: "):
        allowed(constraint, list(b"!"), len(TOKENIZER))
