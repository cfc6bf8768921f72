"""Cohere's own client against a model for vectors: `embed` and `rerank`."""

import cohere

from tests.e2e.clients.asking import KEY, check, run
from tests.e2e.clients.wanted_vectors import MODEL, TEXTS, alike, expected


def client(url: str) -> cohere.ClientV2:
    return cohere.ClientV2(base_url=url, api_key=KEY)


def of_embed(url: str) -> None:
    """The default prompt is the documents'."""
    answer = client(url).embed(
        model=MODEL,
        texts=TEXTS,
        input_type="search_document",
        embedding_types=["float", "int8", "ubinary"],
    )
    vectors = answer.embeddings.float_ or []
    for one, wanted in zip(vectors, expected(url), strict=True):
        alike(one, wanted, "embed")
    small, bits = answer.embeddings.int8 or [], answer.embeddings.ubinary or []
    check(max(abs(a - 127 * b) for a, b in zip(small[0], vectors[0], strict=True)) <= 0.51, "int8")
    check(len(bits[0]) == len(vectors[0]) // 8, "ubinary")
    check(answer.texts == TEXTS, f"texts: {answer.texts}")
    check((answer.meta.billed_units.input_tokens or 0) > 2, "billed units")
    few = client(url).embed(
        model=MODEL, texts=["x"], input_type="search_query", output_dimension=5, truncate="START"
    )
    check(len((few.embeddings.float_ or [[]])[0]) == 5, "output_dimension")


def of_rerank(url: str) -> None:
    answer = client(url).rerank(model=MODEL, query="which", documents=TEXTS, top_n=1)
    check(len(answer.results) == 1 and answer.results[0].index in (0, 1), "rerank")


def of_errors(url: str) -> None:
    try:
        client(url).embed(model=MODEL, texts=["x" * 5000], input_type="x", truncate="NONE")
    except cohere.BadRequestError as error:
        check("at most" in str(error.body), f"body: {error.body}")
    else:
        check(False, "a long text was read")


if __name__ == "__main__":
    run(of_embed, of_rerank, of_errors)
