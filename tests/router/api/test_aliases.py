"""One thing under several names, and bodies that name no model."""

import json
from typing import Any

import pytest

from loraplex.router.api import tokenize
from loraplex.router.api.messages import request as messages
from loraplex.router.api.openai import chat, completions
from loraplex.router.api.request.formatter import ApiLimits
from loraplex.router.api.responses import request as responses
from loraplex.router.api.vectors import fits, pooled
from loraplex.router.call import GenerationCall, RequestError

LIMITS = ApiLimits(base_names=("org/small",))
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Count to three"}]}
COMPLETION: dict[str, Any] = {"prompt": "One, two,"}
MESSAGES: dict[str, Any] = {**CHAT, "max_tokens": 12}


def call_of(parse: Any, body: dict[str, Any]) -> GenerationCall:
    call: GenerationCall = parse(json.dumps(body).encode(), LIMITS).call
    return call


def plainly(parse: Any, *more: Any) -> Any:
    return lambda body, limits: parse(json.loads(body), limits, None, *more)


@pytest.mark.parametrize(
    ("parse", "body", "named", "same"),
    [
        (completions.parse, COMPLETION, {"max_completion_tokens": 9}, {"max_tokens": 9}),
        (
            completions.parse,
            COMPLETION,
            {"max_new_tokens": 5, "rid": "r"},
            {"max_tokens": 5, "request_id": "r"},
        ),
        (completions.parse, COMPLETION, {"random_seed": -3}, {"seed": -3}),
        (chat.parse, CHAT, {"max_completion_tokens": 8, "max_new_tokens": 8}, {"max_tokens": 8}),
        (
            chat.parse,
            CHAT,
            {"min_new_tokens": 2, "max_tokens": 4},
            {"min_tokens": 2, "max_tokens": 4},
        ),
        (chat.parse, CHAT, {"sampling_seed": 11, "seed": 11}, {"seed": 11}),
        (chat.parse, CHAT, {"no_stop_trim": True}, {"include_stop_str_in_output": True}),
        (chat.parse, CHAT, {"max_completion_tokens": None}, {}),
        (messages.parse, MESSAGES, {"extra_key": "salt"}, {"cache_salt": "salt"}),
        (
            plainly(pooled.parse_embeddings),
            {"input": "one"},
            {"extra_key": "salt"},
            {"cache_salt": "salt"},
        ),
    ],
)
def test_two_names_of_one_thing_say_it_once(
    parse: Any, body: dict[str, Any], named: dict[str, Any], same: dict[str, Any]
) -> None:
    assert call_of(parse, body | named) == call_of(parse, body | same)


@pytest.mark.parametrize(
    ("parse", "body", "param", "says"),
    [
        (
            completions.parse,
            {"max_tokens": 3, "max_completion_tokens": 4},
            "max_completion_tokens",
            "contradicts `max_tokens`",
        ),
        (completions.parse, {"max_completion_tokens": "many"}, "max_completion_tokens", "expected"),
        (
            completions.parse,
            {"sampling_seed": 1, "random_seed": 2},
            "random_seed",
            "contradicts `sampling_seed`",
        ),
        (
            chat.parse,
            {"max_completion_tokens": 7, "max_new_tokens": 6},
            "max_new_tokens",
            "contradicts `max_completion_tokens`",
        ),
        (
            chat.parse,
            {"min_tokens": 1, "min_new_tokens": True},
            "min_new_tokens",
            "contradicts `min_tokens`",
        ),
        (chat.parse, {"rid": ["a", "b"]}, "rid", "expected"),
        (
            chat.parse,
            {"grammar": 'root ::= "x"', "regex": "y"},
            "grammar",
            "another form than `regex`",
        ),
    ],
)
def test_two_names_that_differ_are_refused(
    parse: Any, body: dict[str, Any], param: str, says: str
) -> None:
    least = CHAT if parse is chat.parse else COMPLETION
    with pytest.raises(RequestError, match=says) as caught:
        call_of(parse, least | body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "like"),
    [
        ({"grammar": 'root ::= "yes" | "no"'}, {"guided_grammar": 'root ::= "yes" | "no"'}),
        ({"grammar": "root ::= [a-z]+"}, {"ebnf": "root ::= [a-z]+"}),
        ({"grammar": 'start: "1" "2"'}, {"structured_outputs": {"grammar": 'start: "1" "2"'}}),
    ],
)
def test_a_chat_has_llama_cpps_grammar(body: dict[str, Any], like: dict[str, Any]) -> None:
    found, same = call_of(chat.parse, CHAT | body), call_of(chat.parse, CHAT | like)
    assert found.shape is not None
    assert same.shape is not None
    assert found.shape.source == same.shape.source  # type: ignore[union-attr]


@pytest.mark.parametrize("named", [{}, {"model": None}, {"model": "org/small"}])
@pytest.mark.parametrize(
    ("parse", "body"),
    [
        (chat.parse, CHAT),
        (completions.parse, COMPLETION),
        (responses.parse, {"input": "Count to three"}),
        (messages.parse, MESSAGES),
        (plainly(pooled.parse_embeddings), {"input": ["one", "two"]}),
        (plainly(fits.parse_score), {"queries": "one", "documents": ["1", "2"]}),
        (plainly(fits.parse_rerank, 1), {"query": "one", "documents": ["1", "2"]}),
        (plainly(fits.parse_rerank, 1), {"query": "one", "texts": ["1", "2"]}),
        (plainly(pooled.parse_classify), {"input": "one"}),
    ],
)
def test_the_base_needs_no_name(parse: Any, body: dict[str, Any], named: dict[str, Any]) -> None:
    assert call_of(parse, body | named).adapter is None


@pytest.mark.parametrize(
    ("parse", "body"),
    [
        (tokenize.parse_prompt, COMPLETION),
        (tokenize.parse_messages, CHAT),
        (messages.parse_count, CHAT),
        (tokenize.parse_detokenize, {"tokens": [1, 2]}),
    ],
)
def test_tokens_of_the_base_need_no_name(parse: Any, body: dict[str, Any]) -> None:
    found = parse(json.dumps(body).encode(), LIMITS, None)
    call = found[1] if isinstance(found, tuple) else getattr(found, "call", found)
    assert call.adapter is None
