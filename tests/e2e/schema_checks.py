"""Schemathesis' hooks: runs in the clients' environment; see test_api_description.py.

Every check of its own is on. A request that the description allows may be refused only as UNSAID
says: by a rule that no schema can tell.
"""

import re
from typing import Any, NamedTuple

import schemathesis
from schemathesis.checks import CHECKS
from schemathesis.openapi.checks import RejectedPositiveData

_OPENAI = (
    r"POST /(v1/((chat/)?completions(/render|/batch)?|responses|messages(/count_tokens)?)"
    r"|tokenize|invocations|inference/v1/generate|(cohere/)?v2/chat)"
)
_LORAX = r"POST /(tokenize|generate|generate_stream|invocations)?"
_TEXTS = (
    r"POST /(v1/((chat/)?completions(/render|/batch)?|responses|messages(/count_tokens)?)"
    r"|(de)?tokenize|invocations|(inference/v1/)?generate|generate_stream|(cohere/)?v2/chat)?"
)
_REGISTERS = r"POST /(v1/adapters.*|(v1/)?load_lora_adapter|adapters)"
_READS = (
    r"POST /(invocations|v1/embeddings|pooling|(v2/)?embed|classify|classify_batch|(v1/)?score"
    r"|(v[12]/)?rerank)"
)
_UPLOADS = r"PUT /v1/adapters/\{name\}"
_ALL = r".*"
_FORM = (
    r"`(\w+\.)?(response_format|text\.format|output_config\.format|grammar|structured_outputs|guided_\w+|json_schema|regex|ebnf|bad_words"
    r"|allowed_token_ids|ignore_eos(_token)?)[.`\[]"
    r"|supplied: (response_format|grammar|structured_outputs)"
)


class Rule(NamedTuple):
    """routes, told: regular expressions of `METHOD /path` and of the error's message."""

    routes: str
    rule: str
    statuses: tuple[int, ...]
    told: str


UNSAID = (
    # Of all bodies
    Rule(_ALL, "it has at most --max-body-bytes", (413,), r"the body may have at most \d+ bytes"),
    Rule(_ALL, "a whole number has no point (`1.0`)", (400, 422), r"expected `int.*`, got `float`"),
    Rule(_ALL, "a message has what its role and its blocks need", (400, 422), r"^`messages\["),
    # Of texts and tokens
    Rule(_TEXTS, "prompt and output fit the context", (400, 422), r"the model's context is"),
    Rule(_TEXTS, "a prompt has a token", (400, 422), r"expected a prompt of at least one token"),
    Rule(_TEXTS, "the vocabulary has the token", (400, 422), r"expected token ids from 0 to"),
    Rule(_TEXTS, "it could be an adapter's name", (400, 422), r"bad adapter reference"),
    Rule(
        _TEXTS,
        "what another field makes void",
        (400, 422),
        r"needs ([`']|an )|only allowed whe",
    ),
    Rule(_TEXTS, "two names of one thing agree", (400, 422), r"contradicts |not beside|not both"),
    Rule(_TEXTS, "the template can render it", (400, 422), r"chat template|`chat_template"),
    Rule(_TEXTS, "the model reasons", (400,), r"this model has no reasoning apart"),
    Rule(_TEXTS, "words are few tokens", (400, 422), r"bad_words: expected 1 to \d+ tokens"),
    Rule(_TEXTS, "a pattern of Python's that ends", (400, 422), r"`(.*\.)?stop_regex`: "),
    Rule(_TEXTS, "the model has experts", (400, 422), r"^return_routed_experts: "),
    Rule(_TEXTS, "the model reads images", (400, 422), r"reads no images|image_url`: "),
    Rule(_TEXTS, "sizes of images agree", (400, 422), r"`mm_processor_kwargs`: has "),
    # Of forms of answers
    Rule(_TEXTS, "the form of an answer", (400, 422), _FORM),
    # Of OpenAI's routes
    Rule(_TEXTS, "as many tokens as are generated", (400,), r"min_tokens`: expected at most the"),
    Rule(_OPENAI, "nothing is generated but for echo", (400,), r"at least 1, or 0 with `echo`"),
    Rule(
        _OPENAI, "an answer begins or goes on", (400,), r"`(add_generation_prompt|continue_final_m)"
    ),
    Rule(_OPENAI, "the best of several is whole", (400,), r"equal `n` when streaming|least `n`"),
    Rule(_OPENAI, "a key of `logit_bias` is a token id", (400,), r"`logit_bias`: a key"),
    Rule(_OPENAI, "tools have names of their own", (400,), r"no tool of `tools`|an earlier tool"),
    Rule(r"POST /v1/responses", "a tool has its type's parts", (400,), r"goes with custom tools"),
    Rule(r"POST /v1/responses", "an item has what its type says", (400,), r"^`input[`\[]"),
    Rule(r"GET /v1/responses/.*", "an item of the answer", (400,), r"`after`: no such item"),
    # Of files and batches
    Rule(r"POST /v1/batches", "a route that a line may ask", (400,), r"`endpoint`: expected one"),
    Rule(r"POST /v1/batches", "a file of the tenant", (404,), r"no file "),
    Rule(r"POST /v1/batches", "at most two weeks", (400,), r"`completion_window`: expected hours"),
    Rule(r"POST /v1/files", "a file has bytes", (400,), r"`file`: (it is empty|is needed)"),
    Rule(r"POST /v1/files", "an expiry has both parts", (400,), r"`expires_after\["),
    # Of LoRAX's
    Rule(_LORAX, "the best of several is drawn, whole", (422,), r"several sequences"),
    Rule(_LORAX, "what only a whole answer has", (422,), r"not available when streaming"),
    Rule(_LORAX, "what only a stream is", (422,), r"answers of `/generate` are whole"),
    Rule(_TEXTS, "weights of merged adapters", (400, 422), r"weight for each|differ from 0|a dens"),
    Rule(_TEXTS, "what is merged is an adapter", (400, 422), r"got the base model"),
    # Of the three shapes of one route
    Rule(
        r"POST /generate",
        "of one shape",
        (400, 422),
        r"`(text|prompt|sampling_params|token_ids_|image_data|(return_)?routed_experts)",
    ),
    # Of numbers of texts
    Rule(_READS, "the model gives it", (400, 422), r" gives no "),
    Rule(_READS, "it fits the context", (400, 422), r"the model('s context is| reads texts)"),
    Rule(_READS, "the queue could hold it", (400, 422), r"at most \d+ sequences a request"),
    Rule(_READS, "a text has a token", (400, 422), r"expected a \w+ of at least one token"),
    Rule(_READS, "texts or ids, on both sides", (400,), r"`items\[\d+\]`: expected a text besi"),
    Rule(_READS, "the vocabulary has the token", (400, 422), r"expected token ids from 0 to"),
    Rule(_READS, "it could be an adapter's name", (400, 422), r"bad adapter reference"),
    Rule(_READS, "what another field makes void", (400, 422), r"needs (`|an )"),
    Rule(_READS, "two names of one thing agree", (400, 422), r"contradicts |not both|both be "),
    Rule(_READS, "the model has the prompt", (400, 422), r"`prompt_name`: the model has no"),
    Rule(_READS, "a vector has as many numbers", (400, 422), r"`dimensions`: the model's vec"),
    Rule(_READS, "the template can render it", (400,), r"chat template|`chat_template"),
    Rule(
        _READS, "an answer begins or goes on", (400,), r"`(add_generation_prompt|continue_final_m)"
    ),
    Rule(_READS, "classes are as many as they are", (400,), r"classes are as many"),
    Rule(_READS, "the model reads images", (400, 422), r"reads no images"),
    Rule(_READS, "the template has a place for it", (400,), r"`instruction`: the model's prompt"),
    Rule(_READS, "one query, or one for each document", (400,), r"expected one, or \d+"),
    Rule(_READS, "weights of merged adapters", (400, 422), r"weight for each|differ from 0|a den"),
    Rule(_READS, "what is merged is an adapter", (400, 422), r"got the base model"),
    # Of operators'
    Rule(_REGISTERS, "a reference names its source", (400,), r"names no source|bad adapter refer"),
    Rule(
        _REGISTERS, "a name has its form", (400,), r"`name`: .*(in a name|a name (has|begins|with))"
    ),
    Rule(
        _REGISTERS, "what a name means is said once", (400,), r"give (ref|it)|they need `versions`"
    ),
    Rule(_UPLOADS, "files that hold an adapter", (422,), r"the adapter cannot be served"),
    Rule(_UPLOADS, "a name has its form", (400,), r"in a name|a name (has|begins|with)"),
    Rule(r"DELETE /adapters/\{name\}", "what options declare stays", (400,), r"is declared by"),
    Rule(r"POST /abort_request", "it says what to end", (400,), r"is needed, or `abort_all`"),
    Rule(r"(GET|POST) /flush_cache", "no cache can be flushed", (400,), r"nothing was flushed"),
    Rule(r"POST /v1/feedback", "two names of one thing agree", (400,), r"contradicts "),
    Rule(r"POST /v1/keys", "a key ends in the future", (400,), r"lies in the past"),
    Rule(r"GET /v1/adapters", "a name is printed", (400,), r"`(search|after)`: expected a name"),
    Rule(r"GET /v1/organization/.*", "a page is one of the answer's", (400,), r"^`page`: expected"),
    Rule(r"GET /v1/usage", "days are in order, and few", (400,), r"expected at most|lies after"),
)


def is_unsaid(label: str, status: int, told: str) -> bool:
    """label: `METHOD /path`."""
    return any(
        status in rule.statuses and re.fullmatch(rule.routes, label) and re.search(rule.told, told)
        for rule in UNSAID
    )


def accepts_what_is_described(ctx: Any, response: Any, case: Any) -> None:
    """In place of `positive_data_acceptance`."""
    try:
        CHECKS.get_one("positive_data_acceptance")(ctx, response, case)
    except RejectedPositiveData:
        if not is_unsaid(case.operation.label, response.status_code, _message(response)):
            raise


def _message(response: Any) -> str:
    error = response.json()["error"]
    return str(error["message"] if isinstance(error, dict) else error)


schemathesis.check(accepts_what_is_described)
