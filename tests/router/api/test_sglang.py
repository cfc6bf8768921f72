"""SGLang's bodies as calls, and its answers as its clients read them."""

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.router.api.about import FleetState, served_model, served_settings
from loraplex.router.api.request.formatter import ApiLimits, Formatter
from loraplex.router.api.sglang.generate import is_native, parse, parts_of
from loraplex.router.api.vllm.control import vllm_config
from loraplex.router.call import AdapterChoice, GenerationCall, RequestError, TopToken
from loraplex.router.shape.shape import JsonSchema, Regex
from loraplex.server.protocol import SamplingParams
from tests.router.api.answers import HEAD, PROMPT, TOKENS, events, payloads, result
from tests.router.fake_worker import make_card

LIMITS = ApiLimits(base_names=("org/small",), max_n=4)
# What sglang.bench_serving sends.
BENCH: dict[str, Any] = {
    "text": "hi",
    "sampling_params": {"temperature": 0.0, "max_new_tokens": 32, "ignore_eos": True},
    "stream": True,
    "lora_path": None,
    "return_logprob": False,
    "return_routed_experts": False,
    "logprob_start_len": -1,
}


def call_of(**body: Any) -> GenerationCall:
    return parse({"text": "hi", **body}, LIMITS, None).call


def drawn(**sampling: Any) -> GenerationCall:
    return call_of(sampling_params=sampling)


def formatter(**body: Any) -> Formatter:
    return parse({"text": "Say", **body}, LIMITS, None).formatter(HEAD)


def whole(*results: Any, **body: Any) -> Any:
    return json.loads(formatter(**body).whole(results or [result()], [PROMPT]))


@pytest.mark.parametrize(
    ("body", "native"),
    [
        ({"text": "a"}, True),
        ({"text": ""}, True),
        ({"input_ids": [1]}, True),
        ({"text": None, "inputs": "a"}, False),
        ({"text": "", "inputs": "a"}, False),
        ({"inputs": "a"}, False),
        ({}, False),
        ({"prompt": "a"}, False),
    ],
)
def test_the_text_says_whose_shape_it_is(body: dict[str, Any], native: bool) -> None:
    assert is_native(body) is native


@pytest.mark.parametrize("field", ["text", "input_ids"])
def test_mixtures_are_refused(field: str) -> None:
    with pytest.raises(RequestError, match="give it or `inputs`, not both") as fault:
        is_native({"inputs": "a", field: "a"})
    assert fault.value.param == field


def test_what_the_benchmark_asks() -> None:
    call = parse(BENCH, LIMITS, None).call
    assert (call.api, call.prompts, call.adapter, call.stream) == ("sglang", ("hi",), None, True)
    assert call.max_tokens == 32
    assert call.sampling == SamplingParams(temperature=0.0, ignore_eos=True)
    named = parse(BENCH | {"lora_path": "json"}, LIMITS, None).call.adapter
    assert isinstance(named, AdapterChoice)
    assert named.adapter_id == "json"


def test_defaults() -> None:
    call = call_of()
    assert (call.max_tokens, call.n, call.stop, call.stream) == (128, 1, (), False)
    assert call.sampling == SamplingParams()
    assert call.add_special_tokens


def test_every_sampling_parameter() -> None:
    call = drawn(
        max_new_tokens=9,
        min_new_tokens=2,
        temperature=3.5,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={"3": 1},
        sampling_seed=-1,
        n=2,
        stop="a",
        stop_token_ids=[4],
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        no_stop_trim=True,
        json_schema='{"type": "object"}',
    )
    assert call.sampling == SamplingParams(
        temperature=3.5,
        top_p=0.5,
        min_p=0.1,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={3: 1.0},
        min_tokens=2,
        stop_token_ids=(4,),
    )
    assert (call.max_tokens, call.n, call.best_of, call.seed) == (9, 2, 2, 2**64 - 1)
    assert (call.stop, call.include_stop) == (("a",), True)
    assert not call.skip_special_tokens
    assert not call.spaces_between_special_tokens
    assert isinstance(call.shape, JsonSchema)
    assert isinstance(drawn(regex="a+").shape, Regex)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "logprobs", "prompt_logprobs"),
    [
        ({}, None, None),
        ({"top_logprobs_num": 3}, None, None),
        ({"return_logprob": True}, 0, None),
        ({"return_logprob": True, "logprob_start_len": -1}, 0, None),
        ({"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3}, 3, 3),
    ],
)
def test_logprobs(body: dict[str, Any], logprobs: Any, prompt_logprobs: Any, stream: bool) -> None:
    sampling = call_of(**body, stream=stream).sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == (logprobs, prompt_logprobs)


@pytest.mark.parametrize(
    ("body", "prompts"),
    [
        ({"text": ["a", "b"]}, ("a", "b")),
        ({"text": None, "input_ids": [1, 2]}, ([1, 2],)),
        ({"text": None, "input_ids": [[1], [2, 3]]}, ([1], [2, 3])),
    ],
)
def test_prompts(body: dict[str, Any], prompts: Any) -> None:
    assert call_of(**body).prompts == prompts


def test_lists_of_one_value() -> None:
    both = {"text": ["a", "b"], "lora_path": ["json", "json"], "return_logprob": [True, True]}
    assert parts_of(json.dumps(both).encode()) == []
    call = call_of(**both, sampling_params=[{"top_k": 3}, {"top_k": 3}])
    assert isinstance(call.adapter, AdapterChoice)
    assert (call.adapter.adapter_id, call.sampling.top_k, call.sampling.logprobs) == ("json", 3, 0)
    assert call_of(text=["a", "b"], lora_path=[None, None]).adapter is None


PATHS, DRAWN = ["json", None], [{"top_k": 3}, {"top_k": 4}]


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        (
            {"text": ["a", "b"], "lora_path": PATHS, "rid": "r", "token_ids_logprob": [7, 5]},
            [
                {"text": "a", "lora_path": "json", "rid": "r_0", "token_ids_logprob": [7, 5]},
                {"text": "b", "lora_path": None, "rid": "r_1", "token_ids_logprob": [7, 5]},
            ],
        ),
        (
            {"input_ids": [[1], [2, 3]], "sampling_params": DRAWN, "rid": ["x", "y"]},
            [
                {"input_ids": [1], "sampling_params": {"top_k": 3}, "rid": "x"},
                {"input_ids": [2, 3], "sampling_params": {"top_k": 4}, "rid": "y"},
            ],
        ),
        (
            {"text": ["a", "b"], "lora_path": PATHS, "token_ids_logprob": [[7], [5]]},
            [
                {"text": "a", "lora_path": "json", "token_ids_logprob": [7]},
                {"text": "b", "lora_path": None, "token_ids_logprob": [5]},
            ],
        ),
        ({"text": ["a", "b"], "lora_path": PATHS, "stream": True}, []),
        ({"text": ["a", "b"], "lora_path": ["json", None, None]}, []),
        ({"input_ids": [1, 2], "lora_path": PATHS}, []),
        ({"text": "ab", "lora_path": PATHS}, []),
        ({"inputs": "a", "lora_path": PATHS}, []),
        ({"text": ["a"] * 257, "lora_path": ["json", *[None] * 256]}, []),
    ],
)
def test_prompts_that_differ_are_parted(body: dict[str, Any], parts: list[Any]) -> None:
    assert [json.loads(part) for part in parts_of(json.dumps(body).encode())] == parts


@pytest.mark.parametrize(
    ("text", "given", "listed"),
    [
        ("a", [7, 5], (7, 5)),
        (["a", "b"], [7, 5], (7, 5)),
        (["a", "b"], [[7, 5], [7, 5]], (7, 5)),
        ("a", [], ()),
    ],
)
def test_listed_tokens(text: Any, given: Any, listed: tuple[int, ...]) -> None:
    body = {"text": text, "token_ids_logprob": given}
    scored = call_of(**body, return_logprob=True, top_logprobs_num=2).sampling
    assert (scored.logprobs, scored.logprob_token_ids) == (2, listed)
    assert call_of(**body).sampling.logprob_token_ids == ()


def test_listed_tokens_are_shown() -> None:
    own = (TopToken(7, "x", -3.0), TopToken(5, "y", float("-inf")))
    tokens = tuple(msgspec.structs.replace(token, listed=own) for token in TOKENS)
    one = msgspec.structs.replace(result(), tokens=tokens)
    asked = {"return_logprob": True, "token_ids_logprob": [7, 5]}
    meta = whole(one, **asked)["meta_info"]
    assert meta["output_token_ids_logprobs"] == [[[-3.0, 7, None], [-9999.0, 5, None]]] * 4
    assert meta["input_token_ids_logprobs"] == []
    assert "output_top_logprobs" not in meta
    assert "output_token_ids_logprobs" not in whole(one, return_logprob=True)["meta_info"]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"text": ["a", "b"], "lora_path": ["json", None]}, "lora_path"),
    ({"text": ["a", "b"], "sampling_params": [{"top_k": 3}, {}]}, "sampling_params"),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
    ({"lora_path": ["json"]}, "lora_path"),
    ({"rid": ["a"]}, "rid"),
    ({"text": ["a", "b"], "rid": ["a"]}, "rid"),
    ({"input_ids": [1]}, "input_ids"),
    ({"text": []}, "text"),
    ({"text": None}, "text"),
    ({"text": None, "input_ids": []}, "input_ids"),
    ({"text": None, "input_ids": [1, [2]]}, "input_ids"),
    ({"text": 3}, "text"),
    ({"parameters": {"a": 1}}, "parameters"),
    ({"messages": [1]}, "messages"),
    ({"nonsense": 1}, "nonsense"),
    ({"image_data": ["a", ["b"]]}, "image_data[1]"),
    ({"text": ["a", "b"], "image_data": ["a"]}, "image_data"),
    ({"image_data": {"url": "a"}}, "image_data"),
    ({"multi_modal_data": {"image": "a"}}, "multi_modal_data"),
    ({"mm_processor_kwargs": {"max_pixels": 1}}, "mm_processor_kwargs"),
    ({"return_hidden_states": True}, "return_hidden_states"),
    ({"return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
    ({"return_logprob": True, "token_ids_logprob": [1] * 21}, "token_ids_logprob"),
    ({"return_logprob": True, "token_ids_logprob": [1, [2]]}, "token_ids_logprob"),
    (
        {"text": ["a", "b"], "return_logprob": True, "token_ids_logprob": [[1], [2]]},
        "token_ids_logprob",
    ),
    ({"logprob_start_len": -2}, "logprob_start_len"),
    ({"cache_salt": "a", "extra_key": "b"}, "extra_key"),
    ({"lora_path": "../../x"}, "lora_path"),
    *[
        ({"sampling_params": {name: value}}, f"sampling_params.{name}")
        for name, value in (
            ("n", 5),
            ("n", 0),
            ("temperature", -1),
            ("top_p", 0),
            ("stop", ["a"] * 17),
            ("stop_regex", "("),
            ("max_tokens", 3),
            ("max_new_tokens", -1),
            ("min_new_tokens", 129),
            ("stop_token_ids", [1] * 65),
            ("structural_tag", "{}"),
            ("json_schema", "nonsense"),
            ("custom_params", {"a": 1}),
        )
    ],
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=lambda value: str(value)[:60])
def test_faults_name_the_callers_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as fault:
        call_of(**body)
    assert (fault.value.param or "").startswith(param)
    assert f"{param.rpartition('.')[2]}" in fault.value.message


def test_a_field_that_is_nearly_right() -> None:
    with pytest.raises(RequestError, match=r"did you mean `max_new_tokens`"):
        drawn(max_tokens=3)


def test_a_whole_answer() -> None:
    answer = whole(msgspec.structs.replace(result(), matched=2, elapsed_s=1.5))
    assert answer == {
        "text": "Helü",
        "output_ids": [11, 13, 14, 2],
        "meta_info": {
            "id": "req1",
            "finish_reason": {"type": "stop", "matched": 2},
            "prompt_tokens": 2,
            "completion_tokens": 4,
            "cached_tokens": PROMPT.cached_tokens,
            "e2e_latency": 1.5,
        },
    }


def test_an_end_by_length() -> None:
    meta = whole(result(finish="length"))["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 4}


def test_an_answer_that_broke_off() -> None:
    with pytest.raises(RequestError, match="broke off"):
        whole(result(finish="error"))
    ended = whole(result(finish="abort"))["meta_info"]["finish_reason"]
    assert ended == {"type": "abort", "message": "aborted by the caller"}


def test_lists_are_answered_by_lists() -> None:
    assert len(whole(text=["Say"])) == 1
    several = [result(choice=0), result(choice=1)]
    answers = whole(*several, sampling_params={"n": 2}, rid="mine")
    assert [answer["meta_info"]["id"] for answer in answers] == ["mine_0", "mine_1"]
    own = whole(*several, text=["Say"], sampling_params={"n": 2}, rid=["a"])
    assert [answer["meta_info"]["id"] for answer in own] == ["a_0", "a_1"]
    assert whole(rid="mine")["meta_info"]["id"] == "mine"


def test_scores() -> None:
    body = {"return_logprob": True, "top_logprobs_num": 1}
    meta = whole(**body)["meta_info"]
    assert meta["output_token_logprobs"][0] == [-0.25, 11, None]
    assert meta["output_top_logprobs"][0] == [[-0.25, 11, None]]
    assert len(meta["output_token_logprobs"]) == len(TOKENS)
    assert (meta["input_token_logprobs"], meta["input_top_logprobs"]) == ([], [])
    read = whole(**body, logprob_start_len=0, return_text_in_logprobs=True)["meta_info"]
    first, second = read["input_token_logprobs"]
    assert (first, second) == ([None, 0, "<s>"], [-2.0, 21, "Say"])
    assert read["input_top_logprobs"] == [None, [[-0.5, 22, "Tell"]]]
    later = whole(**body, logprob_start_len=1)["meta_info"]
    assert later["input_token_logprobs"] == [[-2.0, 21, None]]
    assert "output_top_logprobs" not in whole(return_logprob=True)["meta_info"]


def test_a_stream_holds_all_so_far() -> None:
    form = formatter(stream=True, return_logprob=True)
    data = form.prompt(PROMPT) + b"".join(map(form.chunk, events())) + form.end()
    *parts, last, done = payloads(data)
    assert done == "[DONE]"
    for before, after in zip(parts, [*parts[1:], last], strict=True):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
        assert "e2e_latency" not in before["meta_info"]
        assert "index" not in before
    assert last["text"] == "Helü"
    assert last["meta_info"]["completion_tokens"] == len(last["output_ids"]) == 4
    assert last["meta_info"]["finish_reason"]["type"] == "stop"
    assert len(last["meta_info"]["output_token_logprobs"]) == 4


def test_events_of_several_have_an_index() -> None:
    form = formatter(stream=True, text=["Say", "Say"], sampling_params={"n": 2})
    form.prompt(PROMPT)
    form.prompt(msgspec.structs.replace(PROMPT, prompt_index=1))
    ask = events()[0]
    data = [msgspec.structs.replace(ask, prompt_index=p, choice=c) for p in (0, 1) for c in (0, 1)]
    parts = payloads(b"".join(map(form.chunk, data)))
    assert [part["index"] for part in parts] == [0, 1, 2, 3]
    assert [part["meta_info"]["id"] for part in parts] == [f"req1_{i}" for i in range(4)]


def test_errors_in_a_stream_are_openais() -> None:
    data = formatter(stream=True).error(RequestError("incomplete", "why"))
    assert payloads(data)[0]["error"]["message"] == "why"


def test_about_the_server() -> None:
    card = make_card()
    model = msgspec.to_builtins(served_model(card))
    assert (model["model_path"], model["is_generation"]) == ("fake-base", True)
    assert not served_model(msgspec.structs.replace(card, writes=False)).is_generation
    config = vllm_config(card, processed_logprobs=False, adapter_slots=8, shards=2)
    settings = msgspec.to_builtins(served_settings(card, "1", FleetState(2, 1, 9), config))
    state = {"workers": 2, "workers_ready": 1, "max_running_requests": 9}
    assert (settings["context_length"], settings["internal_states"]) == (512, [state])


values = st.none() | st.booleans() | st.integers(-2, 3) | st.text(max_size=2)
names = st.sampled_from((*BENCH, "input_ids", "rid", "inputs", "parameters", "top_logprobs_num"))


@given(st.dictionaries(names, values | st.lists(values, max_size=2)))
def test_any_object_is_a_call_or_a_fault_of_the_caller(body: dict[str, Any]) -> None:
    with contextlib.suppress(RequestError):
        assert parse(body, LIMITS, None).call.api == "sglang"
