"""litellm's rerankers: vLLM's and Cohere's shapes."""

import os

# litellm asks for a list of prices over the network otherwise.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

from tests.e2e.clients.asking import KEY, check, run

DOCUMENTS = ["a document", "another one", "a third of them"]


def of_vllm(url: str) -> None:
    answer = litellm.rerank(
        model="hosted_vllm/base",
        query="which",
        documents=DOCUMENTS,
        top_n=2,
        api_base=url,
        api_key=KEY,
    )
    scores = [one["relevance_score"] for one in answer.results]
    check(len(scores) == 2 and scores == sorted(scores, reverse=True), f"scores: {scores}")
    first = answer.results[0]
    check(first["document"]["text"] == DOCUMENTS[first["index"]], "document")


def of_cohere(url: str) -> None:
    answer = litellm.rerank(
        model="cohere/base",
        query="which",
        documents=DOCUMENTS,
        api_base=f"{url}/v2/rerank",
        api_key=KEY,
    )
    check(sorted(one["index"] for one in answer.results) == [0, 1, 2], "indices")


if __name__ == "__main__":
    run(of_vllm, of_cohere)
