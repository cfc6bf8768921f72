"""Clients of embeddings: openai, litellm, langchain, lorax-client and huggingface_hub agree."""

import os
from typing import Any

# litellm asks for a list of prices over the network otherwise.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
import lorax
import openai
from huggingface_hub import InferenceClient
from langchain_openai import OpenAIEmbeddings

from tests.e2e.clients.asking import KEY, check, run

TEXTS = ["what is it", "a text"]
MODEL = "one"


def expected(url: str) -> list[list[float]]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    answer = client.embeddings.create(model=MODEL, input=TEXTS)
    return [one.embedding for one in answer.data]


def alike(found: Any, wanted: list[float], what: str) -> None:
    check(len(found) == len(wanted), f"{what}: {len(found)} numbers")
    check(max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < 1e-5, what)


def of_litellm(url: str) -> None:
    for provider in ("openai", "hosted_vllm"):
        answer = litellm.embedding(
            model=f"{provider}/{MODEL}", input=TEXTS, api_base=f"{url}/v1", api_key=KEY
        )
        for one, wanted in zip(answer.data, expected(url), strict=True):
            alike(one["embedding"], wanted, provider)
        check(answer.usage.prompt_tokens > 2, "usage")


def of_langchain(url: str) -> None:
    embeddings = OpenAIEmbeddings(
        model=MODEL, base_url=f"{url}/v1", api_key=KEY, check_embedding_ctx_length=False
    )
    wanted = expected(url)
    for one, numbers in zip(embeddings.embed_documents(TEXTS), wanted, strict=True):
        alike(one, numbers, "embed_documents")
    alike(embeddings.embed_query(TEXTS[0]), wanted[0], "embed_query")
    few = OpenAIEmbeddings(
        model=MODEL,
        base_url=f"{url}/v1",
        api_key=KEY,
        check_embedding_ctx_length=False,
        dimensions=5,
    )
    check(len(few.embed_query("x")) == 5, "dimensions")


def of_lorax(url: str) -> None:
    base = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY).embeddings.create(
        model="base", input=TEXTS[0]
    )
    found = lorax.Client(url, timeout=240).embed(TEXTS[0])
    alike(found.embeddings, base.data[0].embedding, "lorax")


def of_hub(url: str) -> None:
    """TEI's shape, by a field of its own or by the text alone."""
    hub = InferenceClient(f"{url}/embed")
    base = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY).embeddings.create(
        model="base", input=TEXTS[0]
    )
    for asked in (None, True):
        found = hub.feature_extraction(TEXTS[0], normalize=asked)
        alike(found[0].tolist(), base.data[0].embedding, f"feature_extraction: {asked}")


if __name__ == "__main__":
    run(of_litellm, of_langchain, of_lorax, of_hub)
