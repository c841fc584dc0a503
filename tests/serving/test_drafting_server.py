"""`specache serve` with drafts (--verify): rows of one batch as without them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
from transformers import LlamaForCausalLM

from served import answer, chat_once, figures, grown, prompt_of, serving, write_checkpoint

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}},
    "required": ["kind"],
    "additionalProperties": False,
}


def test_a_server_that_drafts_makes_answers_together(tmp_path: Path) -> None:
    """Whose tokens come beside each other, and are the uncompiled model's, up to a stop string too; so are those of a
    conversation's next turn. Answers of a schema follow it."""
    checkpoint = write_checkpoint(tmp_path)
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    uncompiled = LlamaForCausalLM.from_pretrained(checkpoint).eval()
    prompt = "Once upon a time. " * 4
    expected = answer(uncompiled, prompt, 24)
    with serving(checkpoint, "--verify", "4", "--top-k", "8") as drafting:
        ask: dict[str, Any] = {"model": drafting.name, "prompt": prompt, "max_tokens": 24, "temperature": 0}
        with ThreadPoolExecutor() as clients:
            together = clients.map(lambda _: drafting.client.completions.create(**ask).choices[0].text, range(3))
            assert list(together) == [expected] * 3
        stopped = drafting.client.completions.create(**ask, stop=expected[9:12]).choices[0].text
        assert stopped == expected[: expected.index(expected[9:12])]
        form: Any = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
        talk = [{"role": "user", "content": 'Pets: {"kind":"cat"} {"kind":"dog"} ' * 3}]
        pet = drafting.client.chat.completions.create(
            model=drafting.name, messages=talk, max_tokens=60, temperature=1, seed=1, response_format=form
        ).choices[0]
        assert pet.finish_reason == "stop"
        jsonschema.validate(json.loads(pet.message.content), SCHEMA)
        talk = [{"role": "user", "content": "Why? " * 9}]
        talk += [{"role": "assistant", "content": chat_once(drafting, talk)}, {"role": "user", "content": "And?"}]
        before = figures(drafting)
        assert chat_once(drafting, talk) == answer(uncompiled, prompt_of(talk), 8)
        assert grown(drafting, before, "specache_prompt_tokens_total reused") > 40
