"""The served model, and the conversion of a request's fields to a question for it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import HTTPException
from jinja2 import TemplateError
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import GenerationConfig, LogitsProcessorList

from specache_compile.checkpoints.loaded import open_checkpoint, placed, with_weights

from .answer import Question
from .calls import COMPACT, format_of, grammar_of_call, grammar_of_text, parser_of
from .processors import Constraint, Penalties
from .requests import Body, ChatBody, CompletionBody, Tool


class ServedModel:
    """The compiled model and its tokenizer, under the name that the user typed. No code of the checkpoint runs."""

    def __init__(self, checkpoint: str, device: str, options: Mapping[str, Any]) -> None:
        opened: Any = open_checkpoint(checkpoint, trust_remote_code=False)
        self.name, self.tokenizer = checkpoint, opened.tokenizer
        model = with_weights(opened.folder, dtype="auto", trust_remote_code=False, use_safetensors=True)
        self.model: Any = placed(model, device)
        self.model.compile(backend="specache", options=dict(options))
        # For answers with a grammar. It takes a second, so it is created before the first request.
        size = max(self.vocabulary, len(self.tokenizer))
        ends = self.model.generation_config.eos_token_id
        self.grammar_tokenizer: LLTokenizer = from_tokenizer(self.tokenizer, size, ends)

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the model has."""
        return int(self.model.config.get_text_config().vocab_size)


def completion(served: ServedModel, body: CompletionBody) -> Question:
    return replace(question(served, body, served.tokenizer(body.prompt)["input_ids"]), continued=True)


def chat(served: ServedModel, body: ChatBody) -> Question:
    """The question of a chat. Status 400 without a chat template, or if it rejects the messages or ignores
    the tools."""
    tokenizer = served.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise HTTPException(400, f"{served.name} has no chat template. Use /v1/completions")
    messages = [message.model_dump(exclude_none=True) for message in body.messages]
    offered = [] if body.tool_choice == "none" else body.tools or []
    tools = [tool.model_dump(exclude_none=True) for tool in offered] or None
    more = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort:
        more.setdefault("reasoning_effort", body.reasoning_effort)

    def text(answer: bool = True, tools: Any = tools) -> str:
        try:
            # All of the server's arguments are passed, so that a request cannot.
            rendered = tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=None, add_generation_prompt=answer, continue_final_message=False,
                tokenize=False, **more,
            )  # fmt: skip
            return str(rendered)
        except (TemplateError, TypeError, ValueError) as error:  # the template rejects the messages
            raise HTTPException(400, f"the chat template: {error}") from error

    whole, without_opening = text(), text(answer=False)
    if tools is not None and text(tools=None) == whole:
        raise HTTPException(400, f"tools: the chat template of {served.name} ignores them. Leave tools out")
    opening = whole.removeprefix(without_opening) if whole.startswith(without_opening) else ""
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    parser = parser_of(tokenizer, served.model, whole, opening, tools)
    return question(served, body, ids, parser, called_of(served, body, opening))


def question(served: ServedModel, body: Body, ids: list[int], parser: Any = None, calls: str | None = None) -> Question:
    """A question. calls: the grammar of an answer with tool calls; None: calls are not constrained."""
    grammar, schema, processors = calls, body.answer_schema, LogitsProcessorList()
    if body.frequency_penalty or body.presence_penalty:
        processors.append(Penalties(body.frequency_penalty or 0.0, body.presence_penalty or 0.0, len(ids)))
    if grammar is None and schema is not None:
        grammar = LLMatcher.grammar_from_json_schema({"x-guidance": COMPACT, **schema})
        parser = None  # the answer has one part
    if grammar is not None:
        if body.ignore_eos or body.min_tokens:
            raise HTTPException(400, "ignore_eos, min_tokens: not supported with a schema. Leave them out")
        try:
            processors.append(Constraint(served.grammar_tokenizer, grammar, len(ids)))
        except ValueError as error:
            raise HTTPException(400, f"the answer's schema: {error}") from error
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return Question(ids, config_of(served, body), processors, stop, body.seed, parser)


def called_of(served: ServedModel, body: ChatBody, opening: str) -> str | None:
    """The grammar of an answer with tool calls; None: calls are not constrained."""
    choice, form, schema = body.tool_choice or "auto", format_of(served.tokenizer), body.answer_schema
    named = choice.function.name if isinstance(choice, Tool) else None
    offered = [tool.function for tool in body.tools or [] if named in (None, tool.function.name)]
    functions = [function.model_dump() for function in offered]
    if choice == "none" or (choice == "auto" and not (form and functions)):
        return None
    if not functions:
        raise HTTPException(400, f"tool_choice: tools has no {named or 'function'}")
    if form is None:
        raise HTTPException(400, "tool_choice: the chat template's call format is not supported. Use 'auto'")
    if choice != "auto" or schema is not None:
        return grammar_of_call(served.tokenizer, form, opening, functions, schema if choice == "auto" else None)
    return grammar_of_text(served.tokenizer, form, functions) if any(one.strict for one in offered) else None


def config_of(served: ServedModel, body: Body) -> GenerationConfig:
    """The checkpoint's settings, overridden by the request's."""
    config = copy.deepcopy(served.model.generation_config)
    config.max_new_tokens, config.min_new_tokens = body.longest, body.min_tokens
    sampling = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    if any(value is not None for value in sampling.values()):
        config.do_sample = body.temperature != 0
        config.top_k = config.top_k or 0  # None would mean 50
    if not config.do_sample:
        config.temperature = config.top_p = config.top_k = config.min_p = None
    else:
        config.update(**{name: value for name, value in sampling.items() if value is not None})
        config.top_k = max(0, config.top_k or 0)  # -1 (vLLM) and 0 mean every token
    if body.repetition_penalty is not None:
        config.repetition_penalty = body.repetition_penalty
    config.eos_token_id = ends_of(served, body, config)
    config.cache_implementation = None  # the cache belongs to the batch
    unknown = [token for token in body.logit_bias or {} if token >= served.vocabulary]
    if unknown:
        raise HTTPException(400, f"logit_bias: the model has no token {unknown[0]}")
    if body.logit_bias:
        config.sequence_bias = {(token,): value for token, value in body.logit_bias.items()}
    return config


def ends_of(served: ServedModel, body: Body, config: GenerationConfig) -> list[int]:
    """The stop tokens: the checkpoint's, unless ignored, and the request's."""
    own = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    kept = [] if body.ignore_eos else [token for token in own if token is not None]
    return [*kept, *(body.stop_token_ids or ())] or [served.vocabulary]  # None would mean the checkpoint's
