"""Runs in the environment of the published lorax-client; see test_clients.py."""

import asyncio
import json
import sys

from lorax import AsyncClient, Client
from lorax.errors import GenerationError, NotFoundError, ValidationError
from lorax.types import MergedAdapters


def check(condition: bool, what: str) -> None:
    if not condition:
        raise SystemExit(f"failed: {what}")


def sync_client(url: str, message: str) -> str:
    client = Client(url)
    whole = client.generate(message, adapter_id="json", max_new_tokens=100)
    json.loads(whole.generated_text)
    check(whole.details.finish_reason == "eos_token", "finish_reason")
    check(whole.details.generated_tokens == len(whole.details.tokens), "generated_tokens")
    check(all(token.logprob <= 0 for token in whole.details.tokens), "logprobs")
    events = list(client.generate_stream(message, adapter_id="json", max_new_tokens=100))
    check(events[-1].generated_text == whole.generated_text, "streamed text")
    check(events[-1].details.finish_reason == "eos_token", "streamed finish_reason")
    full = client.generate(message, max_new_tokens=5, return_full_text=True, do_sample=True, seed=3)
    check(full.generated_text.startswith(message), "return_full_text")
    check(full.details.seed == 3, "seed")
    best = client.generate(message, best_of=2, do_sample=True, max_new_tokens=5)
    check(len(best.details.best_of_sequences) == 1, "best_of_sequences")
    prefill = client.generate(message, max_new_tokens=2, decoder_input_details=True)
    check(len(prefill.details.prefill) == prefill.details.prompt_tokens, "prefill")
    more = client.generate(message, max_new_tokens=3, return_k_alternatives=2)
    check(len(more.details.tokens[0].alternative_tokens) == 2, "alternative_tokens")
    stopped = client.generate(message, max_new_tokens=40, stop_sequences=["e"])
    check(stopped.details.finish_reason == "stop_sequence", "stop_sequence")
    check(stopped.generated_text.endswith("e"), "stop text stays")
    return str(whole.generated_text)


def merges(url: str, message: str, expected: str) -> None:
    client = Client(url)
    json_alone = MergedAdapters(ids=["json", "sql"], weights=[1.0, 0.0], density=0.0)
    whole = client.generate(message, merged_adapters=json_alone, max_new_tokens=100)
    check(whole.generated_text == expected, "merged text")
    for strategy in ("linear", "ties", "dare_linear", "dare_ties"):
        both = MergedAdapters(
            ids=["json", "sql"],
            weights=[0.5, 0.5],
            merge_strategy=strategy,
            density=0.5,
            majority_sign_method="total",
        )
        arguments = {"merged_adapters": both, "max_new_tokens": 20}
        whole = client.generate(message, **arguments)
        check(whole.details.generated_tokens > 0, f"{strategy} tokens")
        events = list(client.generate_stream(message, **arguments))
        check(events[-1].generated_text == whole.generated_text, f"{strategy} stream")
    for wrong in (
        {"merged_adapters": json_alone, "adapter_id": "json"},
        {"merged_adapters": MergedAdapters(ids=["json"], weights=[0.0], density=0.0)},
    ):
        try:
            client.generate(message, **wrong)
        except ValidationError as caught:
            check(bool(str(caught)), "error text")
        else:
            raise SystemExit(f"failed: no error for {wrong}")


def sync_errors(url: str) -> None:
    client = Client(url)
    for error, arguments in (
        (ValidationError, {"adapter_id": "json", "temperature": 0.7, "max_new_tokens": 100_000}),
        ((NotFoundError, GenerationError), {"adapter_id": "no-such-adapter"}),
    ):
        for call in (client.generate, lambda p, **a: list(client.generate_stream(p, **a))):
            try:
                call("x", **arguments)
            except error as caught:
                check(bool(str(caught)), "error text")
            else:
                raise SystemExit(f"failed: no error for {arguments}")


async def async_client(url: str, message: str, expected: str) -> None:
    client = AsyncClient(url)
    whole = await client.generate(message, adapter_id="json", max_new_tokens=100)
    check(whole.generated_text == expected, "async text")
    texts = [
        event.token.text
        async for event in client.generate_stream(message, adapter_id="json", max_new_tokens=100)
        if not event.token.special
    ]
    check("".join(texts) == expected, "async stream")
    try:
        await client.generate("x", adapter_id="no-such-adapter")
    except (NotFoundError, GenerationError):
        pass
    else:
        raise SystemExit("failed: no async error")


def main() -> None:
    url, message = sys.argv[1:]
    text = sync_client(url, message)
    merges(url, message, text)
    sync_errors(url)
    asyncio.run(async_client(url, message, text))
    print("all checks passed")


if __name__ == "__main__":
    main()
