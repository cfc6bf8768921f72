"""guidance: its clients of OpenAI, vLLM and SGLang, with schemas, regexes and grammars."""

import re

import guidance
from guidance._ast import GrammarNode
from guidance.models import Model, OpenAI
from guidance.models.experimental import SglangModel, VLLMModel

from tests.e2e.clients.asking import (
    JSON,
    KEY,
    MESSAGE,
    Request,
    check,
    run,
)


def asked(model: Model, form: GrammarNode) -> str:
    with guidance.user():
        model += MESSAGE
    with guidance.assistant():
        model += form
    return str(model["answer"])


def schemas(url: str) -> None:
    form = guidance.json(name="answer", schema=Request, temperature=0.5, max_tokens=200)
    for kind in (OpenAI, VLLMModel, SglangModel):
        model = kind(JSON, base_url=f"{url}/v1", api_key=KEY, echo=False)
        Request.model_validate_json(asked(model, form))


def grammars(url: str) -> None:
    model = VLLMModel(JSON, base_url=f"{url}/v1", api_key=KEY, echo=False)
    chosen = asked(model, guidance.select(["order", "cancel"], name="answer"))
    check(chosen in ("order", "cancel"), f"select: {chosen}")
    number = asked(model, guidance.gen("answer", regex="[0-9]{5}"))
    check(re.fullmatch("[0-9]{5}", number) is not None, f"regex: {number}")


if __name__ == "__main__":
    run(schemas, grammars)
