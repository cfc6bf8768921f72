"""The server that is loaded: its API, and the bodies that requests to it have. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from loraplex.launcher.bench.load.workload import Call
from loraplex.launcher.router_client import bearer

Api = Literal["completions", "chat", "lorax"]
PATHS: Mapping[Api, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "lorax": "/generate_stream",
}
# Each, with the space before it, is one token of GPT-2's vocabulary, and of OpenAI's cl100k and
# o200k. Other vocabularies have most of these words.
_WORDS = """
    a about after again all also always an and any are area as ask at away back be because been
    before being best better big book both but by call came can car case change city come company
    could country course day did different do does done door down each early end even every eye
    face fact family far feel few find first for form found four from full gave get give go going
    good got great group had hand hard has have he head help her here high him his home house how
    idea if important in into is it its job just keep kind knew know large last late later least
    left less let life light like line little live long look made make man many may me mean men
    might mind money month more morning most mother move much must my name need never new next
    night no not nothing now number of off often old on once one only open or order other our out
    over own part party pay people place plan play point power problem program public put question
    quite rather read real right room run said same saw say school second see seem set several
    she should show side since small so social some something state still story study such system
    take talk tell than that the their them then there these they thing think this those though
    thought three through time to today together told too took top toward turn two under until up
    upon us use used very want war was water way we week well went were what when where which
    while white who whole why will with within without woman word work world would write year yes
    yet you young your
"""
WORDS = tuple(_WORDS.split())


@dataclass(frozen=True, slots=True)
class Target:
    """The server that a load is sent to. base_model: what `model` says for the base; "" = not known
    yet. extra: fields of each body (LoRAX: parameters) over those made here; None leaves one
    out. api_key: a caller's. admin_key: the operator's, for orders about adapters.
    """

    url: str
    base_model: str
    api: Api = "completions"
    api_key: str = field(default="", repr=False)
    admin_key: str = field(default="", repr=False)
    timeout_s: float = 600.0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return self.url + PATHS[self.api]

    @property
    def headers(self) -> dict[str, str]:
        return bearer(self.api_key)


def model_of(name: str, registered: bool) -> str:
    """Names the adapter of a folder in requests. registered: under the folder's name."""
    return name if registered else f"local:{name}"


def text_of(token_ids: Sequence[int]) -> str:
    """A text of about as many tokens, for servers that take texts: a word for each."""
    return " ".join(WORDS[token_id % len(WORDS)] for token_id in token_ids)


def body_of(target: Target, call: Call) -> bytes:
    """Makes the body of a request. Greedy, streamed, and past the end of the sequence, so that the
    answer is as long as drawn.

    Completions take token ids, so that the prompt is, too; the others take its text.
    """
    body = _lorax(target, call) if target.api == "lorax" else _openai(target, call)
    return msgspec.json.encode(body)


def _openai(target: Target, call: Call) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt": call.prompt}
    if target.api == "chat":
        prompt = {"messages": [{"role": "user", "content": text_of(call.prompt)}]}
    return prompt | _with_extra(
        target,
        {
            "model": call.adapter or target.base_model,
            "max_tokens": call.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        },
    )


def _lorax(target: Target, call: Call) -> dict[str, Any]:
    """Makes LoRAX's body. LoRAX is greedy by default, and refuses a temperature of 0."""
    parameters: dict[str, Any] = {
        "max_new_tokens": call.output_tokens,
        "ignore_eos_token": True,
        "details": True,
    }
    if call.adapter is not None:
        parameters["adapter_id"] = call.adapter
    return {"inputs": text_of(call.prompt), "parameters": _with_extra(target, parameters)}


def _with_extra(target: Target, fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in (fields | target.extra).items() if value is not None}
