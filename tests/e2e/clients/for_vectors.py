"""Clients of embeddings that have shapes of their own: lorax-client and huggingface_hub."""

import lorax
import openai
from huggingface_hub import InferenceClient

from tests.e2e.clients.asking import KEY, run
from tests.e2e.clients.wanted_vectors import TEXTS, alike


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
    run(of_lorax, of_hub)
