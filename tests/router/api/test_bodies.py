"""What is accepted, what is refused, and that nothing else can happen."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.adapters.chat.conversation import TemplateOptions
from loraplex.adapters.ref import AdapterRef
from loraplex.router.api.admin.keys import CreateKeyBody
from loraplex.router.api.errors import dialect_of_path, error_answer
from loraplex.router.api.lorax import request as lorax
from loraplex.router.api.messages import request as messages
from loraplex.router.api.openai import chat as openai_chat
from loraplex.router.api.openai import completions as openai_completions
from loraplex.router.api.request.body import MAX_PARTS, MAX_VALUES, decode_body
from loraplex.router.api.request.formatter import ApiLimits, ApiRequest
from loraplex.router.call import AdapterChoice, GenerationCall, RequestError

LIMITS = ApiLimits(base_names=("org/small", "small"), max_n=4, max_stop_sequences=4)
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"
MESSAGES = "/v1/messages"
MINIMAL: dict[str, dict[str, Any]] = {
    CHAT: {"model": "small", "messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"model": "small", "prompt": "hi"},
    GENERATE: {"inputs": "hi"},
    MESSAGES: {
        "model": "small",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 16,
    },
}


def parse(path: str, body: bytes) -> ApiRequest:
    if path == CHAT:
        return openai_chat.parse(body, LIMITS)
    if path == COMPLETIONS:
        return openai_completions.parse(body, LIMITS)
    if path == MESSAGES:
        return messages.parse(body, LIMITS)
    return lorax.parse(body, LIMITS, route="/generate")


def body_of(path: str, fields: dict[str, Any]) -> bytes:
    body = json.loads(json.dumps(MINIMAL[path]))
    if path == GENERATE and "inputs" not in fields:
        body["parameters"] = fields
    else:
        body |= fields
    return json.dumps(body).encode()


def call_of(path: str, **fields: Any) -> GenerationCall:
    return parse(path, body_of(path, fields)).call


def content(value: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": value}]}


SHAPED = ("grammar", "response_format")
# (path, fields, the field that the error must name)
BAD_FIELDS: list[tuple[str, dict[str, Any], str | None]] = [
    *[(GENERATE, {name: -1}, name) for name in ("temperature", "seed", "best_of")],
    *[(GENERATE, {name: 0}, name) for name in ("top_p", "typical_p", "truncate")],
    *[(GENERATE, {name: 0}, name) for name in ("max_new_tokens", "repetition_penalty")],
    *[(GENERATE, {"repetition_penalty": value}, "repetition_penalty") for value in (1e-300, 1e4)],
    *[(GENERATE, {name: 2.5}, name) for name in ("top_p", "typical_p", "presence_penalty")],
    *[(GENERATE, {name: "x"}, name) for name in ("details", "seed", "stop", "do_sample")],
    *[(GENERATE, {name: 2**70}, name) for name in ("seed", "top_k", "max_new_tokens")],
    *[(GENERATE, {name: 1.5}, name) for name in ("seed", "top_k", "max_new_tokens")],
    *[(GENERATE, {name: True}, name) for name in ("watermark", "apply_chat_template")],
    *[(GENERATE, {name: {"type": "json"}}, f"{name}.schema") for name in SHAPED],
    (GENERATE, {"response_format": {"schema": {"type": "object"}}}, "response_format.type"),
    (GENERATE, {"typical_p": 1.01}, "typical_p"),
    (GENERATE, {"top_k": -2}, "top_k"),
    (GENERATE, {"frequency_penalty": -2.01}, "frequency_penalty"),
    (GENERATE, {"seed": 2**64}, "seed"),
    (GENERATE, {"best_of": 2}, "best_of"),
    (GENERATE, {"best_of": 2, "temperature": 0, "do_sample": True}, "best_of"),
    (GENERATE, {"best_of": 5, "do_sample": True}, "best_of"),
    (GENERATE, {"stop": [""]}, "stop"),
    (GENERATE, {"stop": [1]}, "stop"),
    (GENERATE, {"stop": ["a"] * 5}, "stop"),
    (GENERATE, {"stop": ["a" * 2000]}, "stop"),
    (GENERATE, {"return_k_alternatives": 21}, "return_k_alternatives"),
    (GENERATE, {"merged_adapters": {"ids": ["a"]}, "adapter_id": "a"}, "merged_adapters"),
    (GENERATE, {"adapter_id": "a", "adapter_source": "pbase"}, "adapter_source"),
    (GENERATE, {"adapter_id": "a", "adapter_source": "nowhere"}, "adapter_source"),
    (GENERATE, {"adapter_id": "hub:a/b", "adapter_source": "local"}, "adapter_source"),
    (GENERATE, {"adapter_id": "s3:bucket"}, "adapter_id"),
    (GENERATE, {"adapter_id": "s3:b-t/k", "adapter_source": "https"}, "adapter_source"),
    (GENERATE, {"adapter_id": "../../x"}, "adapter_id"),
    (GENERATE, {"adapter_id": "json\n"}, "adapter_id"),
    (GENERATE, {"adapter_id": "org/na\x00me"}, "adapter_id"),
    (GENERATE, {"adapter_id": 3}, "adapter_id"),
    (GENERATE, {"top_n_tokens": 3}, "top_n_tokens"),
    (GENERATE, {"top_n_tokens": 21, "details": True}, "top_n_tokens"),
    (GENERATE, {"top_n_tokens": -1}, "top_n_tokens"),
    (GENERATE, {"logit_bias": {"1": 101}}, "logit_bias"),
    (GENERATE, {"stop_token_ids": [1] * 65}, "stop_token_ids"),
    (GENERATE, {"min_tokens": 5, "max_new_tokens": 4}, "min_tokens"),
    (GENERATE, {"priority": -1}, "priority"),
    (GENERATE, {"nonsense": 0}, "nonsense"),
    (GENERATE, {"inputs": "hi", "nonsense": False}, "nonsense"),
    (GENERATE, {"inputs": "hi", "stream": True}, "stream"),
    (GENERATE, {"return_k_alternatives": 2}, "return_k_alternatives"),
    *[
        (GENERATE, {name: "hub", "adapter_id": adapter}, name)
        for name in ("adapter_source", "api_token")
        for adapter in (None, "")
    ],
    *[
        (path, {"model": "", name: "hub"}, name)
        for name in ("adapter_source", "api_token")
        for path in (CHAT, COMPLETIONS)
    ],
    (GENERATE, {"inputs": ""}, "inputs"),
    (GENERATE, {"inputs": None}, "inputs"),
    (GENERATE, {"inputs": ["a"]}, "inputs"),
    (GENERATE, {"inputs": "a", "parameters": []}, "parameters"),
    (GENERATE, {"inputs": "a", "stream": "yes"}, "stream"),
    *[
        (path, fields, next(iter(fields)))
        for path in (CHAT, COMPLETIONS)
        for fields in (
            {"model": 3},
            {"model": "a/b/c"},
            {"model": "a" * 2000},
            {"temperature": -0.1},
            {"temperature": 2.1},
            {"temperature": "hot"},
            {"top_p": -0.1},
            {"top_p": 1.1},
            {"min_p": 1.1},
            {"top_k": -2},
            {"n": 0},
            {"n": 5},
            {"max_tokens": 0},
            {"max_tokens": 2**31},
            {"min_tokens": 5, "max_tokens": 4},
            {"presence_penalty": 2.1},
            {"frequency_penalty": -2.1},
            {"repetition_penalty": 0},
            {"seed": 2**63},
            {"seed": "x"},
            {"stop": 5},
            {"stop": ""},
            {"stop": [""]},
            {"stop": ["a"] * 5},
            {"stop_token_ids": [-1]},
            {"stop_token_ids": [1] * 65},
            {"logit_bias": {"x": 1}},
            {"logit_bias": {"-1": 1}},
            {"logit_bias": {"1": 101}},
            {"logit_bias": [1]},
            {"logit_bias": {str(i): 1 for i in range(1025)}},
            {"stream_options": {"include_usage": True}},
            {"stream_options": {"nonsense": 1}, "stream": True},
            {"metadata": "x"},
            {"metadata": ["x"]},
            {"stream": 1},
            {"user": 1},
            {"nonsense": 1},
            {"suffix": "x"},
            {"function_call": {"name": "f"}},
            {"response_format": {"type": "json"}},
            {"adapter_source": "pbase", "model": "x"},
        )
    ],
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", 1]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", [1]]}, "prompt"),
    (COMPLETIONS, {"prompt": [1, [1]]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [1.5]}, "prompt"),
    (COMPLETIONS, {"prompt": [True]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 257}, "prompt"),
    (COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"logprobs": -1}, "logprobs"),
    (COMPLETIONS, {"best_of": 1, "n": 2}, "best_of"),
    (COMPLETIONS, {"best_of": 2, "stream": True}, "best_of"),
    (COMPLETIONS, {"best_of": 0}, "best_of"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [1]}, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"content": "x"}]}, None),
    (CHAT, content("x", ""), "messages[0].role"),
    (CHAT, content("x", "w" * 65), "messages[0].role"),
    (CHAT, content([{"type": "refusal", "refusal": "x"}]), "messages[0].content[0]"),
    (CHAT, content([{"type": "refusal"}], "assistant"), "messages[0].content[0]"),
    (CHAT, content(None), "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "refusal": "no"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "function", "content": "x"}]}, "messages[0].name"),
    (CHAT, {"messages": [{"role": "assistant", "function_call": {}}]}, "messages[0].function_call"),
    (CHAT, {"messages": [{"role": "assistant", "refusal": 1}]}, "messages[0].refusal"),
    (CHAT, content([]), "messages[0].content"),
    (CHAT, content([{"type": "text"}]), "messages[0].content[0]"),
    (CHAT, content([{"type": "image_url"}]), "messages[0]"),
    (CHAT, content([{"type": "input_audio"}]), "messages[0]"),
    (CHAT, {"messages": [{"role": "user", "content": "x"}] * 4097}, "messages"),
    (CHAT, {"logprobs": 3}, "logprobs"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"max_completion_tokens": 3, "max_tokens": 4}, "max_completion_tokens"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    (CHAT, {"chat_template": 1}, "chat_template"),
    (CHAT, {"documents": "x"}, "documents"),
    (CHAT, {"documents": ["x"]}, "documents[0]"),
    (CHAT, {"continue_final_message": "content"}, "continue_final_message"),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "add_generation"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "content": "x", "reasoning": "a", "thinking": "b"}]},
        "messages[0].reasoning",
    ),
    (CHAT, {"messages": [{"role": "user", "thinking": "x"}]}, "messages[0].content"),
]

BAD_BYTES: dict[str, bytes] = {
    "empty": b"",
    "text": b"hello",
    "list": b"[]",
    "null": b"null",
    "cut": b'{"model": "small"',
    "two": b"{}{}",
    "NaN": b'{"inputs": "x", "temperature": NaN}',
    "Infinity": b'{"inputs": "x", "temperature": -Infinity}',
    "huge float": b'{"inputs": "x", "model": "m", "temperature": 1e400, "parameters": '
    b'{"temperature": 1e400}, "prompt": "x", "messages": [{"role": "user", "content": "x"}]}',
    "huge int": b'{"inputs": "x", "seed": ' + b"9" * 5000 + b"}",
    "byte order mark": b'\xef\xbb\xbf{"inputs": "x"}',
    "utf-16": '{"inputs": "x"}'.encode("utf-16"),
    "not utf-8": b'{"inputs": "\xff"}',
    "lone surrogate": b'{"inputs": "\\ud800", "model": "\\ud800", "prompt": "\\ud800"}',
    "raw newline": b'{"inputs": "a\nb"}',
    "same key twice": b'{"inputs": "a", "inputs": "b"}',
    "same key within": b'{"inputs": "a", "parameters": {"seed": 1, "seed": 2}}',
    "deep": b'{"inputs": ' + b"[" * 10000 + b"]" * 10000 + b"}",
    "33 levels": b'{"x": ' + b"[" * 32 + b"]" * 32 + b"}",
    "many keys": b"{" + b",".join(b'"%d": 0' % i for i in range(MAX_PARTS + 1)) + b"}",
    "wide": b'{"x": [' + b"[]," * MAX_PARTS + b"[]]}",
    "long": b'{"inputs": "x", "model": "small", "prompt": [' + b"1," * MAX_VALUES + b"1]}",
    "comment": b'{"inputs": "x" /* */}',
    "single quotes": b"{'inputs': 'x'}",
}


def test_there_are_many() -> None:
    assert len(BAD_FIELDS) + 3 * len(BAD_BYTES) > 200


@pytest.mark.parametrize(
    ("path", "fields", "param"), BAD_FIELDS, ids=[f"{p} {f!r:.60}" for p, f, _ in BAD_FIELDS]
)
def test_bad_fields_are_named(path: str, fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        parse(path, body_of(path, fields))
    assert caught.value.cause in ("invalid", "unsupported", "unknown_parameter")
    if param is not None:
        assert (caught.value.param or "").startswith(param)
        assert param.partition("[")[0] in caught.value.message
    answer = error_answer(caught.value, dialect_of_path(path))
    assert answer.status == (422 if path == GENERATE else 400)
    json.loads(answer.body)


@pytest.mark.parametrize("path", MINIMAL)
@pytest.mark.parametrize("body", BAD_BYTES.values(), ids=BAD_BYTES)
def test_bad_bytes(path: str, body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        parse(path, body)
    assert caught.value.cause in ("invalid", "unsupported")  # of another route's fields


FIELDS = sorted(
    set(lorax.LoraxParameters.__struct_fields__)
    | set(openai_chat.ChatBody.__struct_fields__)
    | set(openai_completions.CompletionsBody.__struct_fields__)
    | set(messages.MessagesBody.__struct_fields__)
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["user", "hub", "text", "-1", "0"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@settings(max_examples=400)
@given(
    st.sampled_from(list(MINIMAL)),
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3),
)
def test_any_fields_parse_or_are_refused(path: str, fields: dict[str, Any]) -> None:
    try:
        parse(path, body_of(path, fields))
    except RequestError as error:
        error_answer(error, dialect_of_path(path))


@given(st.sampled_from(list(MINIMAL)), st.binary(max_size=60))
def test_any_bytes_are_refused(path: str, body: bytes) -> None:
    with pytest.raises(RequestError):
        parse(path, body)


@pytest.mark.parametrize("text", ["[", "{", ",", '\\"[,', "\\"])
def test_texts_may_be_full_of_punctuation(text: str) -> None:
    prompt = text * (MAX_VALUES + 1)
    assert call_of(COMPLETIONS, prompt=prompt).prompts == (prompt,)


@pytest.mark.parametrize("path", MINIMAL)
def test_nulls_are_absent(path: str) -> None:
    kinds = {
        CHAT: openai_chat.ChatBody,
        COMPLETIONS: openai_completions.CompletionsBody,
        GENERATE: lorax.LoraxParameters,
        MESSAGES: messages.MessagesBody,
    }
    required = {"model", "prompt", *MINIMAL[MESSAGES]}
    nulls = dict.fromkeys(set(kinds[path].__struct_fields__) - required)
    assert call_of(path, **nulls) == parse(path, json.dumps(MINIMAL[path]).encode()).call


# LoRAX


def test_lorax_defaults_are_greedy() -> None:
    call = call_of(GENERATE)
    assert (call.sampling.temperature, call.max_tokens, call.include_stop) == (0.0, None, True)
    assert call.sampling.logprobs is None
    assert call.adapter is None


@pytest.mark.parametrize(
    ("parameters", "temperature"),
    [
        ({"do_sample": True}, 1.0),
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 1.0}, 0.0),
        ({"temperature": 0, "do_sample": True}, 0.0),
        ({"temperature": 1e-9}, 0.0),
        ({"top_k": 5}, 1.0),
        ({"top_k": 0}, 0.0),
        ({"top_k": -1}, 0.0),
        ({"typical_p": 1.0}, 0.0),
        ({"top_p": 1.0}, 1.0),
        ({"typical_p": 0.9}, 1.0),
        ({"repetition_penalty": 1.2}, 0.0),
    ],
)
def test_lorax_samples_when_asked(parameters: dict[str, Any], temperature: float) -> None:
    assert call_of(GENERATE, **parameters).sampling.temperature == temperature


@pytest.mark.parametrize("parameters", [{"top_k": -1}, {"top_k": 0}, {"typical_p": 1.0}])
def test_lorax_filters_that_are_off(parameters: dict[str, Any]) -> None:
    sampling = call_of(GENERATE, do_sample=True, **parameters).sampling
    assert (sampling.temperature, sampling.top_k, sampling.typical_p) == (1.0, 0, 1.0)


# Of every parameter, something that it may ask for.
ASKED: dict[str, Any] = {
    **dict.fromkeys(("adapter_id", "adapter_source", "api_token"), "hub"),
    **dict.fromkeys(("best_of", "max_new_tokens", "truncate", "seed"), 2),
    **dict.fromkeys(("return_k_alternatives", "top_n_tokens"), 2),
    **dict.fromkeys(("temperature", "repetition_penalty", "top_p", "typical_p"), 0.5),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_k"), 0),
    **dict.fromkeys(("min_p", "min_tokens", "priority"), 1),
    **dict.fromkeys(("do_sample", "ignore_eos_token", "return_full_text", "watermark"), True),
    **dict.fromkeys(("details", "decoder_input_details", "apply_chat_template"), True),
    "merged_adapters": {"ids": ["a"], "weights": [1]},
    "adapter_scale": 0.5,
    "add_special_tokens": False,
    "stop": ["a"],
    **dict.fromkeys(SHAPED, {"type": "json_object"}),
    "stop_token_ids": [1],
    "logit_bias": {"1": 1},
    "skip_special_tokens": False,
    "drafts": False,
    "cache_salt": "a",
    "logprobs_mode": "raw",
}


@pytest.mark.parametrize("route", ["/", "/generate", "/generate_stream"])
@pytest.mark.parametrize("name", lorax.LoraxParameters.__struct_fields__)
def test_parameters_beside_parameters_are_not_lost(name: str, route: lorax.Route) -> None:
    for inside in ({}, {"parameters": None}, {"parameters": {"max_new_tokens": 3}}):
        body = json.dumps({"inputs": "hi", name: ASKED[name], **inside}).encode()
        with pytest.raises(RequestError) as caught:
            lorax.parse(body, LIMITS, route=route)
        assert caught.value.message == f"`{name}` belongs inside `parameters`"
        assert (caught.value.cause, caught.value.param) == ("invalid", name)


def test_beside_parameters_what_asks_for_nothing_passes() -> None:
    nothing: dict[str, Any] = {
        "adapter_id": None,
        "details": False,
        "stop": [],
        "api_token": "",
        "options": {"a": 1},
    }
    said_twice = {"temperature": 0.5, "parameters": {"temperature": 0.5}}
    call = call_of(GENERATE, inputs="hi", **nothing, **said_twice)
    assert call == call_of(GENERATE, temperature=0.5)


def test_another_name_of_the_least() -> None:
    for parameters in ({"min_new_tokens": 2}, {"min_new_tokens": 2, "min_tokens": 2}):
        assert call_of(GENERATE, **parameters).sampling.min_tokens == 2
    with pytest.raises(RequestError, match="use `min_tokens`"):
        call_of(GENERATE, min_new_tokens=2, min_tokens=3)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("max_tokens", 5, "use `max_new_tokens` inside `parameters`"),
        ("stop_sequences", ["a"], "use `stop` inside `parameters`"),
        ("model", "org/ada", "use `adapter_id` inside `parameters`"),
        ("lora_id", "org/ada", "use `adapter_id` inside `parameters`"),
        ("logprobs", 0, "use `details` inside `parameters`"),
        ("logprobs", True, "use `details` inside `parameters`"),
        ("include_stop_str_in_output", False, "`/v1/completions` has `include_stop_str_in_output`"),
        ("n", 2, "`/v1/completions` has `n`"),
        ("n", True, "`/v1/completions` has `n`"),
        ("no_repeat_ngram_size", 2, "is not supported yet"),
        ("bad_words", ["a"], "`/v1/completions` has `bad_words`"),
        ("length_penalty", 0.5, "is not supported yet"),
        ("early_stopping", True, "is not supported yet"),
        ("json_schema", {"type": "object"}, "use `response_format` inside `parameters`"),
    ],
)
def test_names_of_other_servers_are_not_lost(name: str, value: Any, says: str) -> None:
    for fields in ({name: value}, {"inputs": "hi", name: value}):
        with pytest.raises(RequestError) as caught:
            call_of(GENERATE, **fields)
        assert says in caught.value.message
        assert (caught.value.cause, caught.value.param) == ("unsupported", name)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "num_beams": 1, "length_penalty": 1.0, "early_stopping": False},
        {"no_repeat_ngram_size": 0, "min_tokens": 0, "min_new_tokens": 0, "min_p": 0.0},
        {"skip_special_tokens": True, "logprobs": False, "top_n_tokens": 0},
        {"stop_sequences": [], "bad_words": [], "tools": [], "logit_bias": {}, "lora_id": ""},
        {"model": "small"},
        {"model": "tgi"},
        {"json_schema": None, "max_tokens": None, "grammar": None},
    ],
)
def test_names_of_other_servers_may_ask_for_nothing(fields: dict[str, Any]) -> None:
    assert call_of(GENERATE, **fields) == call_of(GENERATE)
    assert call_of(GENERATE, inputs="hi", **fields) == call_of(GENERATE)


def test_names_of_other_servers_may_say_the_same() -> None:
    """As LangChain does with stop strings."""
    assert call_of(GENERATE, stop=["a"], stop_sequences=["a"]).stop == ("a",)
    with pytest.raises(RequestError, match="use `stop`"):
        call_of(GENERATE, stop=["a"], stop_sequences=["a", "b"])


@pytest.mark.parametrize(
    ("name", "source"),
    [("bucket/key", "s3"), ("s3://bucket/key/", None), ("s3:bucket/key", "s3")],
)
def test_adapters_from_s3(name: str, source: str | None) -> None:
    choice = call_of(GENERATE, adapter_id=name, adapter_source=source).adapter
    assert isinstance(choice, AdapterChoice)
    assert choice.ref == AdapterRef("s3", "bucket/key")


def test_lorax_parameters_arrive() -> None:
    call = call_of(
        GENERATE,
        adapter_id="org/ada@main",
        adapter_source="hub",
        api_token="hf_x",
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        typical_p=0.8,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=-0.3,
        max_new_tokens=9,
        ignore_eos_token=True,
        stop=["a", "b"],
        truncate=5,
        decoder_input_details=True,
        return_k_alternatives=2,
        seed=2**64 - 1,
        min_p=0.1,
        min_tokens=2,
        stop_token_ids=[3],
        logit_bias={"4": -1},
        skip_special_tokens=False,
        priority=2,
        cache_salt="mine",
        unheard_of=None,
    )
    sampling = call.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 3, 0.9)
    assert (sampling.typical_p, sampling.repetition_penalty) == (0.8, 1.1)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.2, -0.3)
    assert (sampling.ignore_eos, sampling.logprobs, sampling.prompt_logprobs) == (True, 2, 0)
    assert (sampling.min_p, sampling.min_tokens, sampling.stop_token_ids) == (0.1, 2, (3,))
    assert sampling.logit_bias == {4: -1.0}
    assert (call.max_tokens, call.stop, call.truncate) == (9, ("a", "b"), 5)
    assert (call.skip_special_tokens, call.priority, len(call.cache_salt)) == (False, 2, 64)
    assert call.seed == 2**64 - 1
    assert isinstance(call.adapter, AdapterChoice)
    assert (call.adapter.ref.name, call.adapter.ref.revision) == ("org/ada", "main")
    assert call.adapter.token == "hf_x"
    assert "hf_x" not in repr(call)


@pytest.mark.parametrize(
    ("route", "stream", "streams"),
    [
        ("/", True, True),
        ("/", None, False),
        ("/generate", False, False),
        ("/generate_stream", False, True),
        ("/generate_stream", True, True),
    ],
)
def test_lorax_routes_decide_on_streaming(
    route: lorax.Route, stream: bool | None, streams: bool
) -> None:
    body = json.dumps({"inputs": "x", "stream": stream}).encode()
    call = lorax.parse(body, LIMITS, route=route).call
    assert call.stream is streams
    assert (call.sampling.logprobs == 0) is streams


def test_lorax_refuses_what_cannot_be_streamed() -> None:
    for parameters in ({"decoder_input_details": True}, {"best_of": 2, "do_sample": True}):
        body = json.dumps({"inputs": "x", "parameters": parameters}).encode()
        with pytest.raises(RequestError, match="when streaming"):
            lorax.parse(body, LIMITS, route="/generate_stream")


@pytest.mark.parametrize(
    ("bearer", "token"), [("hf_abc", "hf_abc"), ("sk-unused", None), (None, None)]
)
def test_only_hub_tokens_are_lent_to_the_hub(bearer: str | None, token: str | None) -> None:
    body = json.dumps({"inputs": "x", "parameters": {"adapter_id": "org/ada"}}).encode()
    adapter = lorax.parse(body, LIMITS, bearer).call.adapter
    assert isinstance(adapter, AdapterChoice)
    assert adapter.token == token


@pytest.mark.parametrize("name", ["small", "org/small", ""])
def test_the_base_has_names(name: str) -> None:
    assert call_of(GENERATE, adapter_id=name).adapter is None
    assert call_of(COMPLETIONS, model=name).adapter is None


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
@pytest.mark.parametrize("told", [True, False])
def test_special_tokens_around_a_text_are_as_asked(path: str, told: bool) -> None:
    assert call_of(path).add_special_tokens is (path != CHAT)
    assert call_of(path, add_special_tokens=told).add_special_tokens is told


# OpenAI


def test_openai_defaults() -> None:
    completion = call_of(COMPLETIONS)
    assert (completion.max_tokens, completion.sampling.temperature) == (16, 1.0)
    assert completion.add_special_tokens
    chat = call_of(CHAT)
    assert (chat.max_tokens, chat.prompts, chat.add_special_tokens) == (None, (), False)
    assert chat.messages == [{"role": "user", "content": "hi"}]


def test_the_models_own_defaults_apply_to_openai_routes() -> None:
    limits = ApiLimits(
        ("small",), sampling_defaults={"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    )
    body = body_of(CHAT, {"top_p": 1})
    sampling = openai_chat.parse(body, limits).call.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 1.0, 20)
    assert lorax.parse(b'{"inputs": "x"}', limits).call.sampling.top_p == 1.0


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        ("", ("",)),
        ("a\x00b", ("a\x00b",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ([1, 2],)),
        ([[1, 2], [3]], ([1, 2], [3])),
    ],
)
def test_prompts(prompt: Any, expected: Any) -> None:
    assert call_of(COMPLETIONS, prompt=prompt).prompts == expected


def test_openai_fields_arrive() -> None:
    call = call_of(
        COMPLETIONS,
        model="org/ada",
        n=2,
        best_of=3,
        echo=True,
        logprobs=4,
        stop="end",
        seed=-1,
        logit_bias={"5": -100, "6": 3},
        top_k=-1,
        min_p=0.1,
        typical_p=0.9,
        repetition_penalty=1.2,
        ignore_eos=True,
        min_tokens=3,
        stop_token_ids=[7],
        user="me",
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
        suffix="",
    )
    sampling = call.sampling
    assert (call.n, call.best_of, call.echo, call.stop) == (2, 3, True, ("end",))
    assert call.seed == 2**64 - 1
    assert sampling.logit_bias == {5: -100.0, 6: 3.0}
    assert (sampling.top_k, sampling.min_p, sampling.typical_p) == (0, 0.1, 0.9)
    assert (sampling.min_tokens, sampling.ignore_eos) == (3, True)
    assert (sampling.stop_token_ids, sampling.logprobs) == ((7,), 4)
    assert sampling.prompt_logprobs == 4
    assert call.user == "me"


def test_messages_reach_the_template_as_it_expects_them() -> None:
    call = call_of(
        CHAT,
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "a"}] * 2},
            {"role": "user", "content": "b", "name": "Ann"},
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "content": "c", "tool_call_id": "1"},
        ],
        chat_template_kwargs={"enable_thinking": False},
        tool_choice="none",
        reasoning_effort="none",
        tools=[],
        response_format={"type": "text"},
        parallel_tool_calls=False,
    )
    function = {"name": "f", "arguments": "{}"}
    assert call.messages == [
        {"role": "developer", "content": [{"type": "text", "text": "a"}] * 2},
        {"role": "user", "content": "b", "name": "Ann"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "c", "tool_call_id": "1"},
    ]
    written = call.messages[2]["tool_calls"][0]
    assert [*written] == ["id", "type", "function"]  # in which order a template writes it as JSON
    variables = {"enable_thinking": False}
    assert call.template == TemplateOptions(variables=variables, effort="none")
    assert call.tools is None


CALLED = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"role": "assistant"}, ""),
        ({"role": "assistant", "content": None, "tool_calls": []}, ""),
        ({"role": "assistant", "content": []}, ""),
        ({"role": "assistant", "content": [], "tool_calls": [CALLED]}, None),
        ({"role": "tool", "content": None, "tool_call_id": "1"}, ""),
        ({"role": "tool", "content": [], "tool_call_id": "1"}, ""),
        ({"role": "function", "content": None, "name": "f"}, ""),
    ],
)
def test_answers_and_results_may_be_empty(message: dict[str, Any], content: str | None) -> None:
    [found] = call_of(CHAT, messages=[message]).messages or []
    assert found["content"] == content


@pytest.mark.parametrize("role", ["user", "system", "developer"])
@pytest.mark.parametrize("empty", [None, []])
def test_others_say_something(role: str, empty: Any) -> None:
    with pytest.raises(RequestError) as refused:
        call_of(CHAT, messages=[{"role": role, "content": empty}])
    assert refused.value.param == "messages[0].content"


@pytest.mark.parametrize("arguments", [{"arguments": None}, {}])
def test_calls_without_arguments(arguments: dict[str, None]) -> None:
    function = {"name": "f", **arguments}
    for said in ({"tool_calls": [CALLED | {"function": function}]}, {"function_call": function}):
        [found] = call_of(CHAT, messages=[{"role": "assistant", **said}]).messages or []
        assert found["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "auto"},
        {"type": "image", "image": "data:image/png;base64,AA"},
        {"type": "image", "url": "data:image/png;base64,AA"},
    ],
)
def test_pictures_have_several_names(part: dict[str, Any]) -> None:
    picture = {"type": "image_url", "image_url": "data:image/png;base64,AA"}
    found, expected = (call_of(CHAT, **content([each])).messages for each in (part, picture))
    assert found == expected


def test_whole_numbers_may_be_floats() -> None:
    """As JSON Schema has it."""
    given = {"max_tokens": 4, "n": 2, "seed": -3, "logprobs": True, "top_logprobs": 2}
    floats = {name: float(value) if name != "logprobs" else value for name, value in given.items()}
    assert call_of(CHAT, **floats) == call_of(CHAT, **given)
    assert call_of(GENERATE, seed=2.0) == call_of(GENERATE, seed=2)
    for wrong in (4.5, 1e300, 0.0):
        with pytest.raises(RequestError) as refused:
            call_of(CHAT, max_tokens=wrong)
        assert refused.value.param == "max_tokens"


def test_calls_of_custom_tools_go_back() -> None:
    call = {"id": "1", "type": "custom", "custom": {"name": "f", "input": 'a"b'}}
    result = {"role": "tool", "content": "c", "tool_call_id": "1"}
    said = [{"role": "assistant", "tool_calls": [call]}, result]
    function = {"name": "f", "arguments": '{"input":"a\\"b"}'}
    called = [{"id": "1", "type": "function", "function": function}]
    assistant = {"role": "assistant", "content": None, "tool_calls": called}
    assert call_of(CHAT, messages=said).messages == [assistant, result]
    for kind in ("custom", "function"):
        said = [{"role": "assistant", "tool_calls": [{"id": "1", "type": kind}]}]
        with pytest.raises(RequestError) as refused:
            call_of(CHAT, messages=said)
        assert refused.value.param == f"messages[0].tool_calls[0].{kind}"


@pytest.mark.parametrize(
    ("fields", "thinks", "effort", "budget"),
    [
        ({"enable_thinking": True}, True, None, None),
        ({"enable_thinking": False, "thinking_budget": 7}, False, None, 7),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, True, None, 9),
        ({"thinking": {"type": "auto"}, "thinking_budget": -1}, None, None, None),
        ({"reasoning": {"effort": "low", "max_tokens": 9}}, None, "low", 9),
        ({"reasoning": {"effort": "low", "enabled": True}}, True, "low", None),
        ({"reasoning": {"enabled": False}, "reasoning_effort": "none"}, False, "none", None),
        ({"reasoning": {}, "enable_thinking": None}, None, None, None),
    ],
)
def test_reasoning_as_other_servers_name_it(
    fields: dict[str, Any], thinks: bool | None, effort: str | None, budget: int | None
) -> None:
    call = call_of(CHAT, **fields)
    assert (call.template.thinks, call.template.effort) == (thinks, effort)
    assert call.thinking_budget == budget


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"enable_thinking": True, "thinking": {"type": "disabled"}}, "thinking"),
        ({"thinking_budget": 1, "thinking_token_budget": 2}, "thinking_budget"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning.effort"),
        ({"reasoning": {"effort": "low", "enabled": False}}, "reasoning.effort"),
        ({"reasoning_effort": "none", "enable_thinking": True}, "reasoning_effort"),
        ({"reasoning": {"exclude": True}, "include_reasoning": True}, "reasoning.exclude"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"thinking": {"type": "off"}}, "thinking.type"),
        ({"stop_sequences": ["a"], "stop": ["b"]}, "stop_sequences"),
    ],
)
def test_reasoning_that_is_said_twice(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        call_of(CHAT, **fields)
    assert caught.value.param == param


def test_names_of_other_apis() -> None:
    """Anthropic's of stop strings, and that of Responses for the most tokens."""
    for path in (CHAT, COMPLETIONS):
        call = call_of(path, stop_sequences=["a"], max_output_tokens=5)
        assert (call.stop, call.max_tokens) == (("a",), 5)


@pytest.mark.parametrize(
    ("fields", "begins", "continues"),
    [
        ({}, True, False),
        ({"add_generation_prompt": True, "continue_final_message": False}, True, False),
        ({"add_generation_prompt": False}, False, False),
        ({"continue_final_message": True}, False, True),
        ({"continue_final_message": True, "add_generation_prompt": False}, False, True),
    ],
)
def test_how_a_prompt_ends(fields: dict[str, bool], begins: bool, continues: bool) -> None:
    template = call_of(CHAT, **fields).template
    assert (template.add_generation_prompt, template.continue_final_message) == (begins, continues)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_several_names(name: str) -> None:
    said = {"role": "assistant", "content": "b", name: "c"}
    expected = {"role": "assistant", "content": "b", "reasoning_content": "c"}
    assert call_of(CHAT, messages=[said]).messages == [expected]
    same = {"reasoning_content": "c", "reasoning": "c", "thinking": "c"}
    assert call_of(CHAT, messages=[said | same]).messages == [expected]
    alone = {"role": "assistant", "content": None, name: "c"}
    assert call_of(CHAT, messages=[alone]).messages == [expected | {"content": ""}]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_top_p_of_zero_keeps_the_likeliest_token(path: str) -> None:
    sampling = call_of(path, top_p=0, temperature=2).sampling
    assert 0 < sampling.top_p < 1 / 2**20


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_a_choice_among_no_tools_asks_for_nothing(choice: str) -> None:
    assert call_of(CHAT, tool_choice=choice, function_call=choice) == call_of(CHAT)
    assert call_of(COMPLETIONS, tool_choice=choice, function_call=choice) == call_of(COMPLETIONS)
    with pytest.raises(RequestError, match="`tools` is not supported yet"):
        call_of(COMPLETIONS, tools=[{"type": "function", "function": {"name": "f"}}])


def test_the_best_of_one_asks_for_nothing() -> None:
    assert call_of(CHAT, best_of=1) == call_of(CHAT)
    for other in (2, True, "1"):
        with pytest.raises(RequestError, match="`best_of` is not supported yet"):
            call_of(CHAT, best_of=other)


def test_answers_may_be_sent_back_with_all_that_they_had() -> None:
    refused = {"role": "assistant", "content": None, "refusal": "I will not."}
    more: dict[str, Any] = {
        "annotations": [],
        "audio": None,
        "function_call": None,
        "unheard_of": 1,
    }
    call = call_of(
        CHAT,
        messages=[
            refused | more,
            {"role": "assistant", "content": "b", "refusal": "c"},
            {"role": "user", "content": [{"type": "text", "text": "d", "cache_control": {}}]},
        ],
    )
    assert call.messages == [
        {"role": "assistant", "content": "I will not."},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [{"type": "text", "text": "d"}]},
    ]


def test_parts_of_texts_have_several_names() -> None:
    parts = [
        {"type": "refusal", "refusal": "a"},
        {"type": "input_text", "text": "b"},
        {"type": "output_text", "text": "c", "annotations": []},
    ]
    expected = [{"type": "text", "text": text} for text in "abc"]
    assert call_of(CHAT, **content(parts, "assistant")).messages == [
        {"role": "assistant", "content": expected}
    ]


def test_unknown_stream_options_are_named() -> None:
    with pytest.raises(RequestError) as caught:
        call_of(CHAT, stream=True, stream_options={"include_usage": True, "nonsense": 1})
    assert caught.value.param == "stream_options.nonsense"
    options = {"include_usage": True, "include_obfuscation": False, "nonsense": None}
    assert call_of(CHAT, stream=True, stream_options=options).stream


def test_functions_of_old_are_tools() -> None:
    call = {"name": "f", "arguments": "{}"}
    asked = {"role": "assistant", "content": None, "function_call": call}
    told = {"role": "function", "name": "f", "content": "21"}
    chat = call_of(CHAT, messages=[asked, told, asked, told])
    plain = []
    for number in (0, 2):
        call_id = f"call{number:05}"
        tool_call = {"type": "function", "id": call_id, "function": call}
        plain.append({"role": "assistant", "content": None, "tool_calls": [tool_call]})
        plain.append({"role": "tool", "content": "21", "name": "f", "tool_call_id": call_id})
    assert chat.messages == plain
    alone = call_of(CHAT, messages=[told]).messages
    assert alone == [{"role": "tool", "content": "21", "name": "f"}]


def _tool_call(arguments: str) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "assistant", "tool_calls": [call]}]


def test_tool_arguments_are_bounded_together() -> None:
    messages = _tool_call("[" + "{}," * 40_000 + "{}]") * 2
    with pytest.raises(RequestError, match="holds more than"):
        call_of(CHAT, messages=messages)


def test_chat_logprobs() -> None:
    assert call_of(CHAT, logprobs=True).sampling.logprobs == 0
    assert call_of(CHAT, logprobs=True, top_logprobs=5).sampling.logprobs == 5
    assert call_of(CHAT, logprobs=False).sampling.logprobs is None
    assert call_of(CHAT, max_completion_tokens=5).max_tokens == 5


NOT_JSON = "expected a JSON object: not JSON: "


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"[]", "expected a JSON object: not a JSON object but an array"),
        (b"null", "expected a JSON object: not a JSON object but null"),
        (b"1.5", "expected a JSON object: not a JSON object but a number"),
        (b"true", "expected a JSON object: not a JSON object but a boolean"),
        (b'{"id": "a b"}', "`id`: expected `str` of the form [A-Za-z0-9][A-Za-z0-9._-]{0,63}"),
        (b'{"label": 5}', "`label`: expected `str`, got `int`"),
        (b'{"a": ' + b"9" * 4301 + b"}", "a number has more than 4300 digits"),
        (b'{"a": [-' + b"9" * 9999 + b"]}", "a number has more than 4300 digits"),
        (b'{"a": 0.' + b"9" * 4301 + b", }", NOT_JSON),
        (b'{"a": "' + b"9" * 4301 + b'", }', NOT_JSON),
    ],
)
def test_faults_are_said_in_json_words(body: bytes, says: str) -> None:
    with pytest.raises(RequestError) as refused:
        decode_body(body, CreateKeyBody)
    assert str(refused.value).startswith(says)


def test_several_chats_take_what_asks_for_nothing() -> None:
    """Also in values that one chat does not take."""
    body = {"model": "small", "messages": [[{"role": "user", "content": "a"}]]}
    plain = openai_chat.parse_batch(json.dumps(body).encode(), LIMITS).call
    for name, field in openai_chat.OF_ONE.items():
        for value in field.neutral:
            asked = json.dumps(body | {name: value}).encode()
            assert openai_chat.parse_batch(asked, LIMITS).call == plain, (name, value)
