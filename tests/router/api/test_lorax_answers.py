"""LoRAX's answers, as its clients read them."""

import json
from typing import Any

import msgspec
import pytest
from huggingface_hub import TextGenerationOutput, TextGenerationStreamOutput

from loraplex.router.api.errors import error_answer
from loraplex.router.api.lorax import request as lorax
from loraplex.router.api.lorax.generated import Timings, count_headers, head_headers
from loraplex.router.api.request.formatter import ApiLimits, Formatter
from loraplex.router.call import RequestError, TextEvent
from tests.router.api.answers import HEAD, PROMPT, TOKENS, events, payloads, result


def formatter(route: lorax.Route = "/generate", **parameters: Any) -> Formatter:
    body = json.dumps({"inputs": "Say", "parameters": parameters}).encode()
    return lorax.parse(body, ApiLimits(), route=route).formatter(HEAD)


def whole(route: lorax.Route = "/generate", **parameters: Any) -> Any:
    return json.loads(formatter(route, **parameters).whole([result()], [PROMPT]))


def test_without_details() -> None:
    assert whole() == {"generated_text": "Helü"}
    assert whole("/") == [{"generated_text": "Helü"}]
    assert whole(return_full_text=True) == {"generated_text": "SayHelü"}


def test_details() -> None:
    answer = whole(decoder_input_details=True, return_k_alternatives=2)
    details = answer["details"]
    assert list(details) == [
        *("finish_reason", "prompt_tokens", "generated_tokens", "skipped_tokens", "seed"),
        *("prefill", "tokens"),
    ]
    assert (details["finish_reason"], details["seed"]) == ("eos_token", None)
    assert (details["prompt_tokens"], details["generated_tokens"]) == (2, 4)
    assert details["prefill"][0] == {"id": 0, "text": "<s>", "logprob": None}
    assert details["tokens"][0] == {
        "id": 11,
        "text": "Hel",
        "logprob": -0.25,
        "special": False,
        "skipped": False,
        "alternative_tokens": [
            {"id": 11, "text": "Hel", "logprob": -0.25},
            {"id": 12, "text": "Bye", "logprob": -1.5},
        ],
    }
    assert details["tokens"][-1]["text"] == "</s>"
    parsed = TextGenerationOutput.parse_obj_as_instance(answer)
    assert parsed.details is not None
    assert parsed.details.tokens[0].logprob == -0.25
    assert "alternative_tokens" not in whole(details=True)["details"]["tokens"][0]


LIKELY = [
    {"id": 11, "text": "Hel", "logprob": -0.25, "special": False},
    {"id": 12, "text": "Bye", "logprob": -1.5, "special": False},
]
END = {"id": 2, "text": "</s>", "logprob": -0.125, "special": True}


def test_top_tokens_of_a_whole_answer() -> None:
    answer = whole(details=True, top_n_tokens=2)
    top = answer["details"]["top_tokens"]
    assert len(top) == len(answer["details"]["tokens"]) == 4
    assert (top[0], top[-1]) == (LIKELY, [END, LIKELY[1]])
    parsed = TextGenerationOutput.parse_obj_as_instance(answer)
    assert parsed.details is not None
    assert parsed.details.top_tokens is not None
    assert len(parsed.details.top_tokens) == 4
    assert "top_tokens" not in whole(details=True, top_n_tokens=0)["details"]
    assert "top_tokens" not in whole(details=True, return_k_alternatives=2)["details"]


def test_top_tokens_of_a_stream() -> None:
    form = formatter("/generate_stream", top_n_tokens=1)
    parts = payloads(b"".join(map(form.chunk, events())))
    assert [part["top_tokens"] for part in parts][::3] == [LIKELY[:1], [END]]
    assert all(len(part["top_tokens"]) == 1 for part in parts)
    read = TextGenerationStreamOutput.parse_obj_as_instance(parts[0])
    assert read.top_tokens is not None
    assert read.top_tokens[0].id == 11
    plain = payloads(formatter("/generate_stream").chunk(events()[0]))
    assert "top_tokens" not in plain[0]


def test_each_name_has_its_own_number() -> None:
    details = whole(details=True, top_n_tokens=1, return_k_alternatives=2)["details"]
    assert [len(one) for one in details["top_tokens"]] == [1] * 4
    assert [len(one["alternative_tokens"]) for one in details["tokens"]] == [2] * 4


def test_top_tokens_of_every_candidate() -> None:
    results = [result(choice=0, mean=-2), result(choice=1, mean=-1)]
    form = formatter(details=True, best_of=2, do_sample=True, top_n_tokens=1)
    details = json.loads(form.whole(results, [PROMPT]))["details"]
    assert details["best_of_sequences"][0]["top_tokens"] == details["top_tokens"]


@pytest.mark.parametrize(
    ("finish", "reason"), [("eos", "eos_token"), ("stop", "stop_sequence"), ("length", "length")]
)
def test_finish_reasons(finish: Any, reason: str) -> None:
    answer = json.loads(formatter(details=True).whole([result(finish=finish)], [PROMPT]))
    assert answer["details"]["finish_reason"] == reason


def test_the_seed_shows_when_something_was_drawn() -> None:
    assert whole(details=True, do_sample=True)["details"]["seed"] == 7


def test_best_of_is_ranked() -> None:
    results = [result(choice=0, mean=-2), result(choice=1, mean=-1), result(choice=2, mean=-3)]
    results[1] = msgspec.structs.replace(results[1], text="best")
    answer = json.loads(formatter(details=True, best_of=3, do_sample=True).whole(results, [PROMPT]))
    assert answer["generated_text"] == "best"
    others = answer["details"]["best_of_sequences"]
    assert [answer["details"]["seed"], *(other["seed"] for other in others)] == [7, 7, 7]


def test_stream() -> None:
    form = formatter("/generate_stream", details=True)
    data = form.prompt(PROMPT) + b"".join(map(form.chunk, events())) + form.end()
    parts = payloads(data)
    assert "".join(part["token"]["text"] for part in parts) == "Helü"
    assert [part["index"] for part in parts] == [1, 2, 3, 4]
    assert all(part["generated_text"] is part["details"] is None for part in parts[:-1])
    assert parts[-1]["generated_text"] == "Helü"
    assert parts[-1]["details"] == {
        "finish_reason": "eos_token",
        "prompt_tokens": 2,
        "generated_tokens": 4,
        "seed": None,
        "input_length": 2,
    }
    read = [TextGenerationStreamOutput.parse_obj_as_instance(part) for part in parts]
    assert read[-1].details is not None
    assert read[-1].details.input_length == 2
    assert isinstance(read[0].token.logprob, float)


def test_stream_without_details_has_none() -> None:
    form = formatter("/generate_stream")
    assert payloads(b"".join(map(form.chunk, events())))[-1]["details"] is None


def test_an_end_without_a_token_is_still_an_event() -> None:
    form = formatter("/generate_stream")
    data = form.chunk(TextEvent(0, 0, "", (), "length"))
    assert payloads(data)[0]["generated_text"] == ""


def test_infinite_logprobs_become_numbers() -> None:
    form = formatter("/generate_stream")
    for value in (None, float("-inf"), float("nan")):
        token = msgspec.structs.replace(TOKENS[0], logprob=value)
        data = form.chunk(TextEvent(0, 0, "Hel", (token,), None, 1))
        assert isinstance(payloads(data)[0]["token"]["logprob"], float)


def test_line_ends_of_unicode_are_escaped() -> None:
    form = formatter("/generate_stream")
    text = "a\u2028b\u2029c\x85d\r\ne"
    token = msgspec.structs.replace(TOKENS[0], text=text)
    data = form.chunk(TextEvent(0, 0, text, (token,), None, 1))
    assert payloads(data)[0]["token"]["text"] == text
    assert len(data.decode().splitlines()) == 2


def test_broken_answers_are_errors() -> None:
    form = formatter("/generate_stream")
    with pytest.raises(RequestError) as caught:
        form.chunk(events(finish="abort")[-1])
    event = payloads(form.error(caught.value))[0]
    assert event["error_type"] == "incomplete_generation"
    with pytest.raises(RequestError):
        formatter().whole([result(finish="error")], [PROMPT])


def test_validation_errors_read_as_loraxs() -> None:
    with pytest.raises(RequestError) as caught:
        formatter(top_p=7)
    answer = error_answer(caught.value, "lorax")
    assert (answer.status, answer.headers["content-type"]) == (422, "application/json")
    assert json.loads(answer.body) == {
        "error": "Input validation error: `top_p`: expected `float` <= 1.0",
        "error_type": "validation",
    }


def test_headers() -> None:
    assert head_headers(HEAD, "org/small", "cpu", "local") == {
        "x-compute-type": "cpu",
        "x-model-id": "org/small",
        "x-adapter-id": "json",
        "x-adapter-source": "local",
    }
    headers = count_headers([PROMPT], [result()], Timings(1.0, 0.4))
    assert headers["x-total-tokens"] == "6"
    assert headers["x-time-to-first-token"] == "400"
    assert headers["x-time-per-output-token"] == "200"
    assert headers["x-compute-characters"] == "3"
    odd = msgspec.structs.replace(HEAD, adapter_id="a\r\nx: y é")
    assert head_headers(odd, "m", "cpu", None)["x-adapter-id"] == "a??x: y ?"
