"""Embeddings by litellm and langchain, which send what openai's own client sends."""

import os

# litellm asks for a list of prices over the network otherwise.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from langchain_openai import OpenAIEmbeddings

from tests.e2e.clients.asking import KEY, check, run
from tests.e2e.clients.wanted_vectors import MODEL, TEXTS, alike, expected


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


if __name__ == "__main__":
    run(of_litellm, of_langchain)
