"""LMDeploy's bodies as calls, and its answers as its clients read them."""

import json
from typing import Any

import pytest

from loraplex.router.api.request.formatter import ApiLimits
from loraplex.router.api.sglang.lmdeploy import is_native, parse
from loraplex.router.call import AdapterChoice, GenerationCall, RequestError
from tests.router.api.answers import HEAD, PROMPT, events, payloads, result

LIMITS = ApiLimits(base_names=("org/small",))


def call_of(**body: Any) -> GenerationCall:
    return parse(body, LIMITS, None).call


@pytest.mark.parametrize(
    ("body", "native"),
    [
        ({"prompt": "a"}, True),
        ({"prompt": "a", "max_tokens": 3, "stream": True}, True),
        ({"input_ids": [1], "ignore_eos": False}, True),
        ({"input_ids": [1], "max_new_tokens": 3}, True),
        ({"input_ids": [1], "session_id": 3}, True),
        ({"prompt": "a", "text": "", "inputs": []}, True),
        ({"input_ids": [1], "max_tokens": None}, False),
        ({"input_ids": [1]}, False),
        ({"input_ids": [1], "sampling_params": {}, "return_logprob": True}, False),
        ({"prompt": "a", "inputs": "a"}, False),
        ({"prompt": None, "text": "a"}, False),
        ({}, False),
    ],
)
def test_fields_of_its_own_decide(body: dict[str, Any], native: bool) -> None:
    assert is_native(body) is native


@pytest.mark.parametrize(
    ("body", "prompts"),
    [({"prompt": "hi"}, ("hi",)), ({"input_ids": [1, 2]}, ([1, 2],))],
)
def test_a_body_is_a_call(body: dict[str, Any], prompts: Any) -> None:
    call = call_of(
        **body,
        max_tokens=7,
        session_id=3,
        stop="a",
        stop_token_ids=[4],
        temperature=0.5,
        top_k=0,
        ignore_eos=True,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        lora_path="json",
        repetition_ngram_size=0,
    )
    assert (call.api, call.prompts, call.max_tokens) == ("lmdeploy", prompts, 7)
    assert (call.stop, call.include_stop, call.skip_special_tokens) == (("a",), True, False)
    assert (call.sampling.temperature, call.sampling.ignore_eos) == (0.5, True)
    assert call.sampling.stop_token_ids == (4,)
    assert isinstance(call.adapter, AdapterChoice)
    assert call_of(**body).max_tokens == 128


@pytest.mark.parametrize(
    ("body", "param", "why"),
    [
        ({"prompt": "a", "input_ids": [1]}, "input_ids", "not both"),
        ({"prompt": ""}, "prompt", "length"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens", "expected"),
        ({"prompt": "a", "top_logprobs_num": 1}, "top_logprobs_num", "needs `return_logprob`"),
        ({"prompt": "a", "stop": [""]}, "stop[0]", "length"),
        ({"prompt": "a", "stop": ["b"] * 99}, "stop", "at most"),
        ({"prompt": "a", "image_data": "x"}, "image_data", "messages hold images"),
        ({"prompt": "a", "sampling_params": {"n": 1}}, "sampling_params", "in the body itself"),
        ({"prompt": "a", "repetition_ngram_size": 2}, "repetition_ngram_size", "holds repetition"),
    ],
)
def test_refused_by_name(body: dict[str, Any], param: str, why: str) -> None:
    with pytest.raises(RequestError, match=why) as refused:
        call_of(**body)
    assert refused.value.param == param


def test_an_answer() -> None:
    formatter = parse({"prompt": "Say"}, LIMITS, None).formatter(HEAD)
    assert json.loads(formatter.whole([result()], [PROMPT])) == {
        "text": "Helü",
        "output_ids": [11, 13, 14, 2],
        "meta_info": {
            "prompt_tokens": 2,
            "completion_tokens": 4,
            "finish_reason": {"type": "stop", "matched": None},
            "output_token_logprobs": None,
            "input_token_logprobs": None,
            "output_top_logprobs": None,
            "input_top_logprobs": None,
        },
    }


def test_events_hold_new_text_alone_and_pairs() -> None:
    body = {"prompt": "Say", "stream": True, "return_logprob": True, "top_logprobs_num": 2}
    formatter = parse(body, LIMITS, None).formatter(HEAD)
    formatter.prompt(PROMPT)
    stream = b"".join([*map(formatter.chunk, events()), formatter.end()])
    *told, done = payloads(stream)
    assert done == "[DONE]"
    assert [(one["text"], one["output_ids"]) for one in told] == [
        *(("Hel", [11]), ("", [13]), ("ü", [14]), ("", [2]))
    ]
    metas = [one["meta_info"] for one in told]
    assert [meta["completion_tokens"] for meta in metas] == [1, 2, 3, 4]
    assert [bool(meta["finish_reason"]) for meta in metas] == [False, False, False, True]
    assert metas[0]["output_token_logprobs"] == [[-0.25, 11]]
    assert metas[0]["output_top_logprobs"] == [[[-0.25, 11], [-1.5, 12]]]
