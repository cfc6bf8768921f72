"""Haystack's OpenAI embedders and a pipeline of them: vectors are those that openai gets."""

import os
from typing import Any

# It counts its users over the network otherwise.
os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

from haystack import Document, Pipeline
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.utils import Secret

from tests.e2e.clients.asking import KEY, check, run
from tests.e2e.clients.wanted_vectors import MODEL, TEXTS, alike, expected


def options(url: str) -> dict[str, Any]:
    return {
        "api_key": Secret.from_token(KEY),
        "api_base_url": f"{url}/v1",
        "model": MODEL,
        "max_retries": 0,
    }


def texts(url: str) -> None:
    embedder = OpenAITextEmbedder(**options(url))
    for text, wanted in zip(TEXTS, expected(url), strict=True):
        found = embedder.run(text=text)
        alike(found["embedding"], wanted, "a text")
        check(found["meta"]["usage"]["prompt_tokens"] > 1, "usage")
    few = OpenAITextEmbedder(**options(url), dimensions=5)
    check(len(few.run(text="x")["embedding"]) == 5, "dimensions")


def documents(url: str) -> None:
    embedder = OpenAIDocumentEmbedder(**options(url), batch_size=1, progress_bar=False)
    found = embedder.run(documents=[Document(content=text) for text in TEXTS])["documents"]
    for document, wanted in zip(found, expected(url), strict=True):
        alike(document.embedding, wanted, "a document")


def a_pipeline(url: str) -> None:
    store = InMemoryDocumentStore(embedding_similarity_function="cosine")
    embedder = OpenAIDocumentEmbedder(**options(url), progress_bar=False)
    store.write_documents(
        embedder.run(documents=[Document(content=text) for text in TEXTS])["documents"]
    )
    pipeline = Pipeline()
    pipeline.add_component("query", OpenAITextEmbedder(**options(url)))
    pipeline.add_component("find", InMemoryEmbeddingRetriever(store, top_k=1))
    pipeline.connect("query.embedding", "find.query_embedding")
    (best,) = pipeline.run({"query": {"text": TEXTS[1]}})["find"]["documents"]
    check(best.content == TEXTS[1], f"found {best.content}")


if __name__ == "__main__":
    run(texts, documents, a_pipeline)
