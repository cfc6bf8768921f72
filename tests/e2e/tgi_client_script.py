"""Runs in the environment of the published text-generation client; see test_clients.py."""

import asyncio
import json
import re
import sys
from typing import Any

from huggingface_hub import InferenceClient
from text_generation import AsyncClient, Client
from text_generation.errors import ValidationError
from text_generation.types import Grammar


def check(condition: bool, what: str) -> None:
    if not condition:
        raise SystemExit(f"failed: {what}")


# Every parameter that the client has and the server does.
EVERYTHING: dict[str, Any] = {
    "do_sample": True,
    "max_new_tokens": 6,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.1,
    "return_full_text": True,
    "seed": 3,
    "stop_sequences": ["zzz"],
    "temperature": 0.8,
    "top_k": 20,
    "top_p": 0.9,
    "truncate": 12,
    "typical_p": 0.9,
}


def generation(url: str, message: str) -> str:
    client = Client(url)
    plain = client.generate(message, max_new_tokens=10)
    streamed = [*client.generate_stream(message, max_new_tokens=10)]
    check(streamed[-1].generated_text == plain.generated_text, "streamed text")
    whole = client.generate(message, decoder_input_details=True, **EVERYTHING)
    check(whole.details.seed == 3, "seed")
    check(len(whole.details.prefill) == 12, "prefill of a truncated prompt")
    parts = [*client.generate_stream(message, **EVERYTHING)]
    check(parts[-1].generated_text == whole.generated_text, "streamed text of everything")
    several = {k: v for k, v in EVERYTHING.items() if k != "seed"}
    best = client.generate(message, best_of=2, **several).details
    check(best.best_of_sequences[0].seed == best.seed is not None, "seed of the others")
    likely = client.generate(message, max_new_tokens=3, top_n_tokens=2).details
    check([len(one) for one in likely.top_tokens] == [2] * 3, "likeliest tokens of each")
    check(likely.top_tokens[0][0].id == likely.tokens[0].id, "the likeliest of a greedy answer")
    parts = [*client.generate_stream(message, max_new_tokens=3, top_n_tokens=2)]
    check([part.top_tokens for part in parts] == likely.top_tokens, "likeliest tokens streamed")
    for refused in ({"watermark": True}, {"top_n_tokens": 21}):
        try:
            client.generate(message, **refused)
        except ValidationError as caught:
            check(next(iter(refused)) in str(caught), f"error names {refused}")
        else:
            raise SystemExit(f"failed: no error for {refused}")
    digits = client.generate(message, grammar=Grammar(type="regex", value="[0-9]{3}"))
    check(re.fullmatch("[0-9]{3}", digits.generated_text) is not None, "grammar")
    return str(plain.generated_text)


def chat(url: str, message: str) -> None:
    client = Client(url)
    messages = [{"role": "user", "content": message}]
    arguments = {"max_tokens": 8, "temperature": 0.0, "seed": 1, "logprobs": True, "n": 1}
    whole = client.chat(messages, top_logprobs=2, **arguments)
    check(len(whole.choices[0].logprobs["content"]) > 0, "logprobs of a chat")


def hub(url: str, message: str) -> None:
    client = InferenceClient(url)
    arguments = {k: v for k, v in EVERYTHING.items() if k != "stop_sequences"}
    arguments |= {"stop": ["zzz"], "adapter_id": "json", "watermark": False}
    whole = client.text_generation(message, details=True, decoder_input_details=True, **arguments)
    check(whole.details.seed == 3, "hub: seed")
    text = "".join(client.text_generation(message, stream=True, **arguments))
    check(bool(text), "hub: stream")
    body = client.text_generation(message, adapter_id="json", max_new_tokens=100)
    json.loads(body)


async def concurrently(url: str, message: str, expected: str) -> None:
    client = AsyncClient(url)
    whole = await client.generate(message, max_new_tokens=10)
    check(whole.generated_text == expected, "async text")
    texts = [part.token.text async for part in client.generate_stream(message, max_new_tokens=10)]
    check("".join(texts) == expected, "async stream")


def main() -> None:
    url, message = sys.argv[1:]
    text = generation(url, message)
    chat(url, message)
    hub(url, message)
    asyncio.run(concurrently(url, message, text))
    print("all checks passed")


if __name__ == "__main__":
    main()
