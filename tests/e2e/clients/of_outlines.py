"""outlines: its clients of OpenAI, vLLM, SGLang and TGI, with every kind of shape."""

import re
from typing import Any, Literal

import openai
import outlines
from huggingface_hub import InferenceClient
from outlines.types import CFG, Regex

from tests.e2e.clients.asking import (
    JSON,
    KEY,
    MAX_TOKENS,
    MESSAGE,
    Request,
    check,
    run,
)

GRAMMAR = 'start: "order " NUMBER\nNUMBER: /[0-9]{3,5}/'
Kind = Literal["order", "cancel"]


def plain(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def schemas(url: str) -> None:
    makers: tuple[Any, ...] = (outlines.from_openai, outlines.from_vllm, outlines.from_sglang)
    for make in makers:
        model = make(plain(url), JSON)
        answer = model(MESSAGE, Request, temperature=0, max_tokens=MAX_TOKENS)
        Request.model_validate_json(answer)
        pieces = model.stream(MESSAGE, Request, temperature=0, max_tokens=MAX_TOKENS)
        check("".join(pieces) == answer, f"{make.__name__}: stream")


def other_forms(url: str) -> None:
    for make in (outlines.from_vllm, outlines.from_sglang):
        model = make(plain(url), JSON)
        kind = model(MESSAGE, Kind, temperature=0, max_tokens=MAX_TOKENS)
        check(kind in ("order", "cancel"), f"{make.__name__}: {kind}")
        digits = model(MESSAGE, Regex("[0-9]{5}"), temperature=0, max_tokens=MAX_TOKENS)
        check(re.fullmatch("[0-9]{5}", digits) is not None, f"{make.__name__}: {digits}")
    model = outlines.from_vllm(plain(url), JSON)
    told = model(MESSAGE, CFG(GRAMMAR), temperature=0, max_tokens=MAX_TOKENS)
    check(re.fullmatch("order [0-9]{3,5}", told) is not None, f"grammar: {told}")


def tgi(url: str) -> None:
    model = outlines.from_tgi(InferenceClient(url))
    Request.model_validate_json(model(MESSAGE, Request, max_new_tokens=MAX_TOKENS))
    check(model(MESSAGE, Kind, max_new_tokens=MAX_TOKENS) in ("order", "cancel"), "TGI: regex")


if __name__ == "__main__":
    run(schemas, other_forms, tgi)
