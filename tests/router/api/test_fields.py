"""Fields of vLLM, SGLang and others: done, passed because they ask for nothing, or refused."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from loraplex.router.api.errors import dialect_of_path, error_answer
from loraplex.router.api.lorax import request as lorax
from loraplex.router.api.lorax.request import HARMLESS as HARMLESS_BESIDE
from loraplex.router.api.lorax.request import SAID_HERE
from loraplex.router.api.openai import chat as openai_chat
from loraplex.router.api.openai import completions as openai_completions
from loraplex.router.api.openai.common import HARMLESS, OpenAIBody
from loraplex.router.api.request.fields import within_base
from loraplex.router.api.request.formatter import ApiLimits, ApiRequest, Formatter
from loraplex.router.api.request.known_elsewhere import ELSEWHERE
from loraplex.router.call import AdapterChoice, RequestError, TopToken
from tests.router.api.answers import HEAD, PROMPT, TOKENS, events, payloads, result

LIMITS = ApiLimits(base_names=("org/small", "small", "org/small:v2", "hub"))
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"
MINIMAL: dict[str, dict[str, Any]] = {
    CHAT: {"model": "small", "messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"model": "small", "prompt": "hi"},
    GENERATE: {"inputs": "hi"},
}
OWN = {
    CHAT: openai_chat.ChatBody.__struct_fields__,
    COMPLETIONS: openai_completions.CompletionsBody.__struct_fields__,
    GENERATE: (*lorax.LoraxParameters.__struct_fields__, *lorax.LoraxBody.__struct_fields__),
}
OPENAI = (CHAT, COMPLETIONS)
FOREIGN = [(path, name) for path in MINIMAL for name in ELSEWHERE if name not in OWN[path]]
ASKING = {"a": "value that asks for something"}


def parse(path: str, **fields: Any) -> ApiRequest:
    body = json.dumps(MINIMAL[path] | fields).encode()
    if path == CHAT:
        return openai_chat.parse(body, LIMITS)
    if path == COMPLETIONS:
        return openai_completions.parse(body, LIMITS)
    return lorax.parse(body, LIMITS, route="/generate")


def refused(path: str, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(path, **fields)
    return caught.value


# Known elsewhere


@pytest.mark.parametrize(("path", "name"), FOREIGN)
def test_what_asks_for_nothing_passes(path: str, name: str) -> None:
    for value in (None, *ELSEWHERE[name].neutral):
        assert parse(path, **{name: value}) == parse(path)
        if path == GENERATE:
            assert parse(path, parameters={name: value}) == parse(path)


@pytest.mark.parametrize(("path", "name"), FOREIGN)
def test_fields_that_ask_for_something_are_distinguished(path: str, name: str) -> None:
    error = refused(path, **{name: ASKING})
    assert (error.cause, error.param) == ("unsupported", name)
    assert error.message.startswith(f"`{name}` is not ")
    if path in OPENAI:
        assert error.message.endswith(ELSEWHERE[name].hint)
        body = json.loads(error_answer(error, dialect_of_path(path)).body)["error"]
        assert (body["code"], body["param"]) == ("unsupported_parameter", name)
    else:
        assert refused(path, parameters={name: ASKING}).message == error.message


def test_no_hint_leads_nowhere() -> None:
    """What a hint names is a field or a route that there is."""
    fields = {*OWN[CHAT], *OWN[COMPLETIONS], "merged_adapters"}
    routes = {CHAT, COMPLETIONS, GENERATE, "/tokenize"}
    for name, field in ELSEWHERE.items():
        for word in field.hint.split("`")[1::2]:
            assert word in {*fields, *routes, "usage"}, (name, word)
    assert set(SAID_HERE.values()) <= set(lorax.LoraxParameters.__struct_fields__)


@pytest.mark.parametrize("name", sorted({*OpenAIBody.__struct_fields__} - {*OWN[GENERATE]}))
def test_lorax_routes_name_openais_fields(name: str) -> None:
    error = refused(GENERATE, parameters={name: ASKING})
    assert (error.cause, error.param) == ("unsupported", name)
    known = SAID_HERE.get(name)
    told = f"use `{known}` inside" if known else f"`/v1/completions` has `{name}`"
    assert told in error.message


@pytest.mark.parametrize("format", [{"type": "text", "json_schema": None}, {"type": "text"}, {}])
def test_nulls_inside_ask_for_nothing(format: dict[str, Any]) -> None:
    assert parse(CHAT, response_format=format) == parse(CHAT)


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize("name", sorted(HARMLESS - {"metadata"}))
@pytest.mark.parametrize("value", ["x", 1, ASKING, [1]])
def test_harmless_fields_change_nothing(path: str, name: str, value: Any) -> None:
    assert parse(path, **{name: value}) == parse(path)


def test_harmless_fields_beside_parameters() -> None:
    """As older clients of Hugging Face's API send them."""
    assert HARMLESS_BESIDE == ("options",)
    assert parse(GENERATE, options={"wait_for_model": True, "use_gpu": False}) == parse(GENERATE)


# Unknown


@pytest.mark.parametrize(
    ("path", "name", "meant"),
    [
        *[(path, "max_token", "max_tokens") for path in OPENAI],
        *[(path, "temprature", "temperature") for path in OPENAI],
        *[(path, "prompt-logprobs", "prompt_logprobs") for path in OPENAI],
        *[(path, "skipSpecialTokens", "skip_special_tokens") for path in OPENAI],
        (CHAT, "message", "messages"),
        (CHAT, "frobnicate", None),
        (CHAT, "max_tokens" * 100, None),
        (GENERATE, "max_new_token", "max_new_tokens"),
        (GENERATE, "adaptor_id", "adapter_id"),
        (GENERATE, "frobnicate", None),
    ],
)
def test_unknown_fields_are_named_with_the_nearest(path: str, name: str, meant: str | None) -> None:
    values: tuple[Any, ...] = (0, False, "", [], 1.5)
    for value in values:
        inside = {"parameters": {name: value}} if path == GENERATE else {name: value}
        error = refused(path, **inside)
        assert (error.cause, error.param) == ("unknown_parameter", name[:100])
        assert (f"did you mean `{meant}`?" in error.message) == (meant is not None)
        assert ("did you mean" in error.message) == (meant is not None)
    answer = error_answer(error, dialect_of_path(path))
    assert answer.status == (422 if path == GENERATE else 400)
    assert parse(path, **{name: None}) == parse(path)


def test_unknown_fields_beside_parameters_are_named() -> None:
    assert "did you mean `parameters`?" in refused(GENERATE, paramaters={}).message
    assert "did you mean `stream`?" in refused(GENERATE, steam=True).message
    assert "`seed` belongs inside `parameters`" in refused(GENERATE, seed=1).message


def test_unknown_parts_of_stream_options_are_named() -> None:
    error = refused(CHAT, stream=True, stream_options={"include_usages": True})
    assert error.param == "stream_options.include_usages"
    assert "did you mean `stream_options.include_usage`?" in error.message


@given(st.sampled_from([*MINIMAL]), st.text(max_size=80), st.integers() | st.text() | st.booleans())
def test_any_name_passes_or_is_named(path: str, name: str, value: Any) -> None:
    try:
        parse(path, **{name: value})
    except RequestError as error:
        error_answer(error, dialect_of_path(path))


# Adapters


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("small", "small"),
        ("small:", ""),
        ("small:pirate", "pirate"),
        ("org/small:pirate", "pirate"),
        ("org/small:hub:org/ada@v1", "hub:org/ada@v1"),
        ("org/small:v2", "org/small:v2"),
        ("org/small:v2:pirate", "pirate"),
        ("org/small:v2x", "v2x"),
        ("hub:org/ada", "hub:org/ada"),
        ("hub", "hub"),
        ("pirate", "pirate"),
        ("other:pirate", "other:pirate"),
        ("smaller:pirate", "smaller:pirate"),
        ("", ""),
    ],
)
def test_base_and_adapter_in_one_name(model: str, expected: str) -> None:
    assert within_base(model, LIMITS.base_names) == expected


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize(
    "fields",
    [
        {"model": "pirate"},
        {"model": "small:pirate"},
        {"model": "small", "lora_path": "pirate"},
        {"model": "small:", "lora_path": "pirate"},
        {"model": "", "lora_path": "pirate"},
        {"model": "pirate", "lora_path": "pirate"},
        {"model": "org/small:pirate", "lora_path": "pirate"},
    ],
)
def test_an_adapter_has_one_name_at_a_time(path: str, fields: dict[str, Any]) -> None:
    adapter = parse(path, **fields).call.adapter
    assert isinstance(adapter, AdapterChoice)
    assert (adapter.adapter_id, adapter.ref.source) == ("pirate", "alias")
    for model in ("small:", "small", "tgi"):
        assert parse(path, model=model, lora_path="").call.adapter is None


@pytest.mark.parametrize("path", OPENAI)
def test_an_adapter_cannot_have_two_names(path: str) -> None:
    for model in ("sql", "small:sql", "other:pirate"):
        error = refused(path, model=model, lora_path="pirate")
        assert (error.cause, error.param) == ("invalid", "lora_path")
    for several in (["pirate"], ["pirate", "sql"], [None], []):
        error = refused(path, model="small", lora_path=several)
        assert (error.cause, error.param) == ("unsupported", "lora_path")
        assert "`model`" in error.message


# Void


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        *[
            (path, fields, param)
            for path in OPENAI
            for fields, param in (
                ({"adapter_source": "ftp"}, "adapter_source"),
                ({"api_token": "x"}, "api_token"),
                ({"model": "small:", "api_token": "x"}, "api_token"),
                ({"truncation_side": "left"}, "truncation_side"),
                ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
                ({"stream_options": {"include_usage": True}}, "stream_options"),
                ({"stream": True, "prompt_logprobs": 0}, "prompt_logprobs"),
                ({"logprob_token_ids": [5]}, "logprob_token_ids"),
            )
        ],
        (CHAT, {"top_logprobs": 1}, "top_logprobs"),
        (GENERATE, {"parameters": {"adapter_source": "ftp"}}, "adapter_source"),
        (GENERATE, {"parameters": {"api_token": "x", "adapter_id": ""}}, "api_token"),
        (GENERATE, {"parameters": {"return_k_alternatives": 1}}, "return_k_alternatives"),
        (GENERATE, {"stream": True}, "stream"),
    ],
)
def test_void_fields_are_refused(path: str, fields: dict[str, Any], param: str) -> None:
    error = refused(path, **fields)
    assert (error.cause, error.param) == ("invalid", param)


@pytest.mark.parametrize("path", OPENAI)
def test_what_would_be_void_may_ask_for_nothing(path: str) -> None:
    nothing: dict[str, Any] = {
        "stream_options": {"include_usage": False},
        "adapter_source": "",
        "api_token": "",
        "return_tokens_as_token_ids": False,
    }
    assert parse(path, **nothing) == parse(path)
    assert parse(CHAT, top_logprobs=0, logprobs=False) == parse(CHAT)


# Done


@pytest.mark.parametrize("path", OPENAI)
def test_vllms_defaults_change_nothing(path: str) -> None:
    defaults: dict[str, Any] = {
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "include_stop_str_in_output": False,
        "return_token_ids": False,
        "echo": False,
        "priority": 0,
    }
    assert parse(path, **defaults) == parse(path)


@pytest.mark.parametrize("path", OPENAI)
def test_vllms_fields_arrive(path: str) -> None:
    call = parse(
        path,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        include_stop_str_in_output=True,
        prompt_logprobs=3,
        truncate_prompt_tokens=-1,
        truncation_side="right",
        priority=7,
        cache_salt="s" * 1024,
    ).call
    assert (call.skip_special_tokens, call.spaces_between_special_tokens) == (False, False)
    assert (call.include_stop, call.sampling.prompt_logprobs) == (True, 3)
    assert (call.truncate, call.truncate_keeps, call.priority) == (-1, "first", 7)
    assert len(call.cache_salt) == 64
    assert parse(path, truncate_prompt_tokens=5).call.truncate_keeps == "last"


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprob_token_ids": [-1]}, "logprob_token_ids[0]"),
        ({"stop_regex": "("}, "stop_regex"),
        ({"stop_regex": ["a", "a*"]}, "stop_regex"),
        ({"stop_regex": [""]}, "stop_regex"),
        ({"stop_regex": "a" * 257}, "stop_regex"),
        ({"stop_regex": ["a"] * 17}, "stop_regex"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"priority": -1}, "priority"),
        ({"priority": 101}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "s" * 1025}, "cache_salt"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens"),
        ({"lora_path": 5}, "lora_path"),
    ],
)
def test_bounds(path: str, fields: dict[str, Any], param: str) -> None:
    assert (refused(path, **fields).cause, refused(path, **fields).param) == ("invalid", param)


def test_minus_one_gets_a_message_about_its_meaning() -> None:
    error = refused(CHAT, logprobs=True, top_logprobs=-1)
    assert error.message.startswith("`top_logprobs`: -1 asks for the whole vocabulary, ")
    assert error.message.endswith(" tokens; `--max-logprobs` is 20")


@pytest.mark.parametrize(
    ("path", "asked", "found"),
    [
        (CHAT, {"logprobs": True, "top_logprobs": -1}, (20, None)),
        (CHAT, {"prompt_logprobs": -1}, (None, 20)),
        (COMPLETIONS, {"logprobs": -1}, (20, None)),
        (COMPLETIONS, {"logprobs": -1, "echo": True, "prompt_logprobs": 0}, (20, 20)),
    ],
)
def test_minus_one_is_a_small_vocabulary(
    path: str, asked: dict[str, Any], found: tuple[int | None, int | None]
) -> None:
    limits = msgspec.structs.replace(LIMITS, vocab_size=20)
    module = openai_chat if path == CHAT else openai_completions
    call = module.parse(json.dumps(MINIMAL[path] | asked).encode(), limits).call
    assert (call.sampling.logprobs, call.sampling.prompt_logprobs) == found


def test_salts_show_nothing() -> None:
    one, other = (parse(CHAT, cache_salt=salt).call.cache_salt for salt in ("mine", "yours"))
    assert one != other
    assert "mine" not in one
    assert parse(CHAT).call.cache_salt == ""


# Answers


def formatter(path: str, **fields: Any) -> Formatter:
    return parse(path, **fields).formatter(HEAD)


def whole(path: str, **fields: Any) -> Any:
    answer = json.loads(formatter(path, **fields).whole([result()], [PROMPT]))
    kind: Any = ChatCompletion if path == CHAT else Completion
    if path == CHAT or not fields.get("echo"):  # the SDK's types know no null of a first token
        kind.model_validate(answer, strict=True)
    return answer


def streamed(path: str, **fields: Any) -> list[Any]:
    form = formatter(path, stream=True, **fields)
    *parts, done = payloads(form.prompt(PROMPT) + b"".join(map(form.chunk, events())) + form.end())
    assert done == "[DONE]"
    for part in parts if path == CHAT else ():
        ChatCompletionChunk.model_validate(part, strict=True)
    return parts


PROMPT_IDS = [token.token_id for token in PROMPT.tokens]
IDS = [token.token_id for token in TOKENS]


def test_token_ids_of_whole_answers() -> None:
    chat = whole(CHAT, return_token_ids=True)
    assert (chat["prompt_token_ids"], chat["choices"][0]["token_ids"]) == (PROMPT_IDS, IDS)
    choice = whole(COMPLETIONS, return_token_ids=True, echo=True)["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (PROMPT_IDS, IDS)


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize("echo", [False, True])
def test_token_ids_of_streams(path: str, echo: bool) -> None:
    first, *rest = streamed(
        path, return_token_ids=True, echo=echo, logprobs=True if path == CHAT else 0
    )
    where = first if path == CHAT else first["choices"][0]
    assert where["prompt_token_ids"] == PROMPT_IDS
    assert first["choices"][0]["token_ids"] == []
    for part in rest:
        assert {**part, **part["choices"][0]}.get("prompt_token_ids") is None
    assert [i for part in rest for i in part["choices"][0]["token_ids"]] == IDS


@pytest.mark.parametrize("path", OPENAI)
def test_ids_are_reported_where_there_is_no_text(path: str) -> None:
    """A token inside a character, and the end of sequence."""
    parts = streamed(path, return_token_ids=True)
    told = [i for part in parts for i in part["choices"][0]["token_ids"]]
    assert told == IDS


@pytest.mark.parametrize("path", OPENAI)
def test_nothing_is_reported_unasked(path: str) -> None:
    for answer in (whole(path), *streamed(path)):
        for place in (answer, *answer.get("choices", ())):
            for name in ("token_ids", "prompt_token_ids", "prompt_logprobs"):
                assert place.get(name) is None


@pytest.mark.parametrize("path", OPENAI)
def test_prompt_logprobs(path: str) -> None:
    answer = whole(path, prompt_logprobs=1)
    found = (answer if path == CHAT else answer["choices"][0])["prompt_logprobs"]
    assert found == [
        None,
        {
            "21": {"logprob": -2.0, "rank": 3, "decoded_token": "Say"},
            "22": {"logprob": -0.5, "rank": 1, "decoded_token": "Tell"},
        },
    ]
    answer = whole(path, prompt_logprobs=0)
    found = (answer if path == CHAT else answer["choices"][0])["prompt_logprobs"]
    assert [None if one is None else [*one] for one in found] == [None, ["21"]]


def test_an_echoed_prompt_has_the_alternatives_that_it_asked_for() -> None:
    request = parse(COMPLETIONS, echo=True, logprobs=0, prompt_logprobs=2)
    assert request.call.sampling.prompt_logprobs == 2
    choice = whole(COMPLETIONS, echo=True, logprobs=0, prompt_logprobs=2)["choices"][0]
    assert choice["logprobs"]["top_logprobs"][1] == {"Say": -2.0}
    assert len(choice["prompt_logprobs"][1]) == 3


LISTED = (TopToken(12, "Bye", -1.5), TopToken(11, "Hel", -0.25), TopToken(2, "</s>", -9.0))


@pytest.mark.parametrize("path", OPENAI)
def test_listed_tokens_take_the_place_of_the_likeliest(path: str) -> None:
    asked: dict[str, Any] = {"logprob_token_ids": [12, 11, 2], "logprobs": 5}
    if path == CHAT:
        asked |= {"logprobs": True, "top_logprobs": 5}
    sampling = parse(path, **asked).call.sampling
    assert (sampling.logprobs, sampling.logprob_token_ids) == (0, (12, 11, 2))
    tokens = [msgspec.structs.replace(token, top=(), listed=LISTED) for token in TOKENS]
    one = msgspec.structs.replace(result(), tokens=tuple(tokens))
    answer = json.loads(parse(path, **asked).formatter(HEAD).whole([one], [PROMPT]))
    found = answer["choices"][0]["logprobs"]
    if path == CHAT:
        tops = [(top["token"], top["logprob"]) for top in found["content"][0]["top_logprobs"]]
    else:
        tops = [*found["top_logprobs"][0].items()]
    assert tops == [("Hel", -0.25), ("Bye", -1.5), ("</s>", -9.0)]
    most = refused(path, **asked | {"logprob_token_ids": [1] * 21})
    assert (most.cause, most.param) == ("invalid", "logprob_token_ids")


def test_a_chats_logprobs_are_no_number() -> None:
    body = b'{"model": "", "messages": [{"role": "user", "content": "x"}], "logprobs": true}'
    limits = msgspec.structs.replace(LIMITS, max_logprobs=0)
    assert openai_chat.parse(body, limits).call.sampling.logprobs == 0


def test_tokens_as_ids() -> None:
    asked = {"return_tokens_as_token_ids": True}
    choice = whole(COMPLETIONS, logprobs=1, echo=True, **asked)["choices"][0]["logprobs"]
    names = [f"token_id:{i}" for i in PROMPT_IDS + IDS]
    assert choice["tokens"] == names
    assert choice["top_logprobs"][2] == {"token_id:11": -0.25}
    assert (
        choice["text_offset"]
        == whole(COMPLETIONS, logprobs=1, echo=True)["choices"][0]["logprobs"]["text_offset"]
    )
    content = whole(CHAT, logprobs=True, top_logprobs=2, **asked)["choices"][0]["logprobs"][
        "content"
    ]
    assert [token["token"] for token in content] == names[2:]
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["token_id:11", "token_id:12"]
    assert content[0]["bytes"] == [*b"Hel"]


@pytest.mark.parametrize(
    ("last", "echoed"),
    [
        ({"role": "assistant", "content": "Well, "}, "Well, "),
        ({"role": "assistant", "content": [{"type": "text", "text": "a"}] * 2}, "a\na"),
        ({"role": "user", "content": "Hi"}, ""),
    ],
)
def test_echo_of_the_last_message(last: dict[str, Any], echoed: str) -> None:
    asked = {"messages": [{"role": "user", "content": "Say"}, last], "echo": True}
    assert whole(CHAT, **asked)["choices"][0]["message"]["content"] == f"{echoed}Helü"
    for n in (1, 2):
        parts = streamed(CHAT, n=n, **asked)
        texts = [
            p["choices"][0]["delta"].get("content", "")
            for p in parts
            if not p["choices"][0]["index"]
        ]
        assert "".join(texts) == f"{echoed}Helü"


@pytest.mark.parametrize(("path", "prefix"), [(CHAT, "chatcmpl"), (COMPLETIONS, "cmpl")])
def test_the_callers_id(path: str, prefix: str) -> None:
    assert whole(path, request_id="mine")["id"] == f"{prefix}-mine"
    assert {part["id"] for part in streamed(path, request_id="mine")} == {f"{prefix}-mine"}
    assert whole(path)["id"] == f"{prefix}-req1"


# Which logprobs


@pytest.mark.parametrize("path", MINIMAL)
@pytest.mark.parametrize("by_default", [False, True])
def test_a_request_says_which_logprobs_it_wants(path: str, by_default: bool) -> None:
    limits = msgspec.structs.replace(LIMITS, processed_logprobs=by_default)

    def processed(**said: Any) -> bool:
        fields = {"parameters": said} if path == GENERATE else said
        body = json.dumps(MINIMAL[path] | fields).encode()
        kinds: dict[str, Any] = {CHAT: openai_chat, COMPLETIONS: openai_completions}
        parsed = kinds[path].parse(body, limits) if path in kinds else lorax.parse(body, limits)
        return parsed.call.sampling.processed_logprobs

    assert processed() is by_default
    assert processed(logprobs_mode=None) is by_default
    for name in ("raw", "raw_logprobs"):
        assert processed(logprobs_mode=name) is False
        assert processed(logprobs_mode=name.replace("raw", "processed")) is True


@pytest.mark.parametrize("path", OPENAI)
def test_logits_are_refused_by_name_and_other_modes_are_unknown(path: str) -> None:
    for mode in ("raw_logits", "processed_logits"):
        error = refused(path, logprobs_mode=mode)
        assert (error.cause, error.param) == ("unsupported", "logprobs_mode")
        assert "logits are not sent" in error.message
    error = refused(path, logprobs_mode="cooked")
    assert (error.cause, error.param) == ("invalid", "logprobs_mode")
    assert "expected one of raw, processed" in error.message
