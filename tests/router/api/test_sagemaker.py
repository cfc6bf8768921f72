"""Bodies of `/invocations` are those of other routes; its headers say the rest."""

import contextlib
import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.router.api.request.formatter import ApiLimits
from loraplex.router.api.sagemaker import Invocation, dialect_of, parse, shape_of
from loraplex.router.call import AdapterChoice, GenerationCall, RequestError
from loraplex.server.protocol import Gift

PLAIN = Invocation()
LIMITS = ApiLimits(base_names=("org/small",))
CHAT = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "lorax": {"inputs": "hi"},
    "completions": {"prompt": "hi"},
    "chat": {"messages": CHAT},
}


def call_of(body: dict[str, Any], said: Invocation = PLAIN) -> GenerationCall:
    return parse(body, said, LIMITS, None).call


def adapter_in(call: GenerationCall) -> str | None:
    assert isinstance(call.adapter, AdapterChoice | None)
    return None if call.adapter is None else call.adapter.adapter_id


@pytest.mark.parametrize("api", BODIES)
def test_the_text_says_whose_shape_it_is(api: str) -> None:
    call = call_of(BODIES[api])
    assert (call.api, call.adapter, call.stream) == (api, None, False)
    assert dialect_of(shape_of(BODIES[api])) == ("lorax" if api == "lorax" else "openai")


@pytest.mark.parametrize("pair", list(itertools.combinations(BODIES.values(), 2)))
def test_mixtures_are_refused(pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
    with pytest.raises(RequestError, match="not both"):
        call_of(pair[0] | pair[1])


def test_a_body_without_text_is_refused() -> None:
    with pytest.raises(RequestError, match="`inputs`: is needed, or `prompt` or `messages`"):
        call_of({"parameters": {}})


@pytest.mark.parametrize("api", BODIES)
@pytest.mark.parametrize(
    ("stated", "accepts", "streams"),
    [
        (None, False, False),
        (None, True, True),
        (False, True, False),
        (True, False, True),
        (True, True, True),
    ],
)
def test_streams(api: str, stated: bool | None, accepts: bool, streams: bool) -> None:
    """The header asks where the body says nothing."""
    call = call_of(BODIES[api] | {"stream": stated}, Invocation(streams=accepts))
    assert call.stream is streams


@pytest.mark.parametrize("api", BODIES)
def test_the_headers_adapter_goes_first(api: str) -> None:
    named = {"parameters": {"adapter_id": "b"}} if api == "lorax" else {"model": "b"}
    body = BODIES[api] | named
    assert adapter_in(call_of(body)) == "b"
    assert adapter_in(call_of(body, Invocation("a"))) == "a"
    assert adapter_in(call_of(BODIES[api], Invocation("a"))) == "a"


def test_the_header_and_a_merge_contradict_each_other() -> None:
    merged = {"ids": ["a", "b"], "weights": [1, 1]}
    body = {"inputs": "hi", "parameters": {"merged_adapters": merged}}
    with pytest.raises(RequestError, match="cannot both be given"):
        call_of(body, Invocation("a"))


@pytest.mark.parametrize("parameters", [[], "x", 3])
def test_faults_stay_where_they_are(parameters: Any) -> None:
    with pytest.raises(RequestError) as fault:
        call_of({"inputs": "hi", "parameters": parameters}, Invocation("a"))
    assert fault.value.param == "parameters"


@pytest.mark.parametrize(
    ("gives", "body", "api", "use"),
    [
        (("text", "vectors"), {"input": "hi"}, "embeddings", "vector"),
        (("classes",), {"input": "hi", "model": "small"}, "classify", "classes"),
        (("classes",), {"messages": CHAT}, "classify", "classes"),
        (("vectors",), {"messages": CHAT}, "embeddings", "vector"),
        (("text", "vectors"), {"messages": CHAT}, "chat", None),
        (("text", "vectors"), {"messages": CHAT, "task": "embed"}, "embeddings", "vector"),
        (("text", "vectors"), {"queries": "a", "documents": ["b"]}, "score", "fit"),
        (("text", "vectors"), {"text_1": "a", "text_2": "b"}, "score", "fit"),
        (("text", "vectors"), {"query": "a", "documents": ["b"]}, "rerank", "fit"),
    ],
)
def test_texts_that_are_read(
    gives: tuple[Gift, ...], body: dict[str, Any], api: str, use: str | None
) -> None:
    limits = msgspec.structs.replace(LIMITS, gives=gives)
    said = Invocation("a", streams=True)
    call = parse({"model": "org/small"} | body, said, limits, None).call
    assert call.api == api
    assert (call.vector and call.vector.use) == use
    assert adapter_in(call) == "a"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"requestType": "NEW_SESSION"}, PLAIN),
        ({"requestType": "CLOSE"}, PLAIN),
        ({"prompt": "hi"}, Invocation(has_session=True)),
    ],
)
def test_sessions_are_refused_by_name(body: dict[str, Any], said: Invocation) -> None:
    with pytest.raises(RequestError, match="send the whole conversation"):
        call_of(body, said)


values = st.none() | st.booleans() | st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=2)
names = st.sampled_from(("inputs", "prompt", "messages", "stream", "model", "parameters", "x"))


@given(st.dictionaries(names, values), st.booleans())
def test_any_object_is_a_call_or_a_fault_of_the_caller(body: dict[str, Any], events: bool) -> None:
    with contextlib.suppress(RequestError):
        assert call_of(body, Invocation("a", events)).api in BODIES
