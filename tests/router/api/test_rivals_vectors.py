"""`/pooling`, `/v2/embed`, and messages in place of texts: what bodies ask for, what is refused."""

from typing import Any

import numpy as np
import pytest

from loraplex.router.api.request.formatter import ApiLimits, ApiRequest
from loraplex.router.api.vectors import cohere, pooled
from loraplex.router.api.vectors.cohere import EmbeddingType, written
from loraplex.router.call import RequestError

LIMITS = ApiLimits(base_names=("small",))
CLASSIFIER = ApiLimits(base_names=("small",), gives=("classes",))
CHAT = [{"role": "user", "content": "hi"}]
PARSES: dict[str, Any] = {
    "pooling": pooled.parse_pooling,
    "cohere": cohere.parse,
    "embeddings": pooled.parse_embeddings,
    "classify": lambda plain, limits: pooled.parse_classify(plain, limits, None),
}


def asked(route: str, body: dict[str, Any], limits: ApiLimits = LIMITS) -> ApiRequest:
    found: ApiRequest = PARSES[route]({"model": "small"} | body, limits)
    return found


@pytest.mark.parametrize(
    ("limits", "body", "use"),
    [
        (LIMITS, {"input": "hi"}, "vector"),
        (CLASSIFIER, {"input": [1, 2]}, "classes"),
        (LIMITS, {"input": ["a", "b"], "task": "classify"}, "classes"),
        (CLASSIFIER, {"messages": CHAT, "task": "embed"}, "vector"),
    ],
)
def test_a_task_is_vectors_or_classes(limits: ApiLimits, body: dict[str, Any], use: str) -> None:
    call = asked("pooling", body, limits).call
    assert call.vector is not None
    assert call.vector.use == use
    assert (call.messages is None) == ("input" in body)


@pytest.mark.parametrize("route", ["pooling", "embeddings", "classify"])
@pytest.mark.parametrize(
    ("fields", "begins", "continues", "special"),
    [
        ({}, False, False, False),
        ({"add_generation_prompt": True}, True, False, False),
        ({"continue_final_message": True, "add_special_tokens": True}, False, True, True),
    ],
)
def test_messages_are_read_as_a_chat(
    route: str, fields: dict[str, Any], begins: bool, continues: bool, special: bool
) -> None:
    """vLLM begins no answer where nothing says so."""
    call = asked(route, {"messages": CHAT, "chat_template_kwargs": {"a": 1}} | fields).call
    template = call.template
    assert (template.add_generation_prompt, template.continue_final_message) == (begins, continues)
    assert (template.variables, call.add_special_tokens) == ({"a": 1}, special)
    assert call.vector is not None
    assert call.vector.prompt == ""


@pytest.mark.parametrize(
    ("fields", "cut", "keeps"),
    [
        ({}, -1, "first"),
        ({"truncate": "START", "max_tokens": 3}, 3, "last"),
        ({"truncate": "END"}, -1, "first"),
        ({"truncate": "NONE"}, None, "first"),
    ],
)
def test_cohere_cuts_texts(fields: dict[str, Any], cut: int | None, keeps: str) -> None:
    call = asked("cohere", {"texts": ["a"]} | fields).call
    assert (call.truncate, call.truncate_keeps) == (cut, keeps)


def test_cohere_reads_texts_and_inputs() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = asked("cohere", {"inputs": [{"content": parts}], "input_type": "search_query"})
    assert found.call.prompts == ("a\nb",)
    assert found.call.vector is not None
    assert found.call.vector.prompt_names == ("search_query", "query")
    named = asked("cohere", {"model": "x", "texts": ["a"], "adapter_scale": 0.5, "priority": 2})
    assert named.call.priority == 2
    assert named.call.adapter is not None


@pytest.mark.parametrize(
    ("route", "body", "param", "why"),
    [
        ("pooling", {"input": "x", "task": "token_embed"}, "task", "whole texts"),
        ("pooling", {"input": "x", "task": "plugin"}, "task", "whole texts"),
        ("pooling", {"input": "x", "task": "encode"}, "task", "expected one of"),
        ("pooling", {"input": "x", "padding": "max_length"}, "padding", "expected one of"),
        ("pooling", {"input": "x", "task": "classify", "dimensions": 2}, "dimensions", "classes"),
        ("pooling", {}, "input", "or `messages`"),
        ("embeddings", {"input": "x", "messages": CHAT}, "messages", "not both"),
        ("embeddings", {"messages": []}, "messages", "expected 1 to 4096 messages"),
        (
            "embeddings",
            {"input": "x", "normalize": True, "use_activation": False},
            "use_activation",
            "contradicts `normalize`",
        ),
        (
            "classify",
            {"messages": CHAT, "add_generation_prompt": True, "continue_final_message": True},
            "add_generation_prompt",
            "beside `continue_final_message`",
        ),
        ("cohere", {"texts": ["x"], "images": ["data:,"]}, "images", "text alone"),
        (
            "cohere",
            {"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "inputs[0].content[0]",
            "send text",
        ),
        ("cohere", {}, "texts", "or `inputs`"),
        ("cohere", {"texts": []}, "texts", "expected 1 to 2048"),
        ("cohere", {"texts": ["x"], "truncate": "NONE", "max_tokens": 2}, "max_tokens", "START"),
        ("cohere", {"texts": ["x"], "embedding_types": ["int4"]}, "embedding_types[0]", "ubinary"),
        ("cohere", {"texts": ["x"], "normalize": True}, "normalize", "Unrecognized"),
    ],
)
def test_refused_by_name(route: str, body: dict[str, Any], param: str, why: str) -> None:
    with pytest.raises(RequestError, match=why) as refused:
        asked(route, body)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("float", [3.0, -4.0, 0.0]),
        ("int8", [76, -102, 0]),
        ("uint8", [204, 26, 128]),
        ("ubinary", [0b10000000]),
        ("binary", [0]),
    ],
)
def test_kinds_of_numbers(kind: EmbeddingType, expected: list[float]) -> None:
    assert list(written((3.0, -4.0, 0.0), kind)) == expected


def test_bits_are_packed_as_numpy_packs_them() -> None:
    vector = np.random.default_rng(1).standard_normal(24)
    bits = np.packbits(vector > 0)
    assert list(written(tuple(vector), "ubinary")) == bits.tolist()
    assert list(written(tuple(vector), "binary")) == [int(bit) - 128 for bit in bits]
