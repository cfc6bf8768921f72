"""A call's prompts as token ids, and its sampling as the model allows it.

Runs on the event loop; long texts are rendered and encoded in threads.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from loraplex.adapters.chat.conversation import (
    Rendered,
    TemplateFault,
    TemplateOptions,
    choose_template,
)
from loraplex.adapters.manifest import AdapterTemplate
from loraplex.router.api.request.pictures import (
    as_in_body,
    bare,
    in_messages,
    in_text,
    placed,
    spaced,
)
from loraplex.router.call import Api, GenerationCall, GivenPicture, RequestError
from loraplex.router.pictures.reader import Picture, PictureReader
from loraplex.router.text.detokenizer import Detokenizer
from loraplex.router.text.model import TextModel, template_error
from loraplex.router.text.template_sandbox import TemplateSandbox
from loraplex.router.text.turn_taking import DECODED_SIZE
from loraplex.server.protocol import PictureSpan, SamplingParams, VisionCard

# Characters of a text that is cut: what is cut off costs memory all the same.
MAX_ENCODED = 4 << 20


class Prompt(msgspec.Struct, frozen=True):
    """A prompt as the model reads it. text: as given or rendered (of token ids: decoded where it is
    shown, else ""). parts: one for each id, where logprobs of the prompt are asked for.
    detokenizer: has read the prompt, which an answer follows. rendered: of a chat. second: place
    of the first token of a pair's second text; None = the model marks none. spans: as of
    PromptInfo. pictures: whose placeholders are among the ids; files: of those pictures.
    """

    text: str
    ids: list[int]
    parts: Sequence[str]
    detokenizer: Detokenizer | None = None
    rendered: Rendered = Rendered("")
    second: int | None = None
    spans: Sequence[tuple[int, int]] = ()
    pictures: tuple[PictureSpan, ...] = ()
    files: tuple[Picture, ...] = ()


class PromptMakers(NamedTuple):
    """Renderer of adapters' chat templates, and reader of pictures."""

    sandbox: TemplateSandbox
    reader: PictureReader


async def build_prompts(
    call: GenerationCall,
    model: TextModel,
    template: AdapterTemplate | None,
    makers: PromptMakers,
) -> list[Prompt]:
    """Builds the call's prompts, in order. template: the adapter's own, in place of the base's.

    Raises RequestError (template_error, context_length, invalid, invalid_image, file_not_found,
    unsupported).
    """
    if call.messages is not None:
        return [
            await _chat_prompt(call, messages, model, template, makers)
            for messages in (call.messages, *call.further)
        ]
    if call.api == "lorax" and model.card.vision is not None:
        return [await _marked_prompt(call, model, model.card.vision, makers.reader)]
    if call.pictures and model.card.vision is not None:
        return [
            await _placed_prompt(call, prompt, given, model, model.card.vision, makers.reader)
            for prompt, given in zip(call.prompts, call.pictures, strict=True)
        ]
    of_ids = DECODED_SIZE if _is_shown(call) else 1
    size = sum(len(p) * (1 if isinstance(p, str) else of_ids) for p in call.prompts)
    return await model.turns.run(
        size, lambda: [_build(call, model, prompt) for prompt in call.prompts]
    )


async def _chat_prompt(
    call: GenerationCall,
    messages: list[dict[str, Any]],
    model: TextModel,
    template: AdapterTemplate | None,
    makers: PromptMakers,
) -> Prompt:
    vision, pictures = model.card.vision, list[Picture]()
    if vision is not None and (given := in_messages(messages)):
        pictures = await makers.reader.read(as_in_body(given, call.api), model, vision)
        messages = bare(messages)
    try:
        found = await render_messages(messages, call.template, model, template, makers.sandbox)
    except RequestError as error:
        raise error.spelled(_CHAT_FIELDS.get(call.api, {})) from error
    prompt = await _encode_with(call, model, found.text, pictures)
    return msgspec.structs.replace(prompt, rendered=found)


async def _marked_prompt(
    call: GenerationCall, model: TextModel, vision: VisionCard, reader: PictureReader
) -> Prompt:
    """Builds the prompt of a text that may mark pictures."""
    marked = str(call.prompts[0])
    place = "".join(model.token(token_id) or "" for token_id in vision.place)
    given, text = await model.turns.run(
        len(marked), lambda: in_text(marked, input_field(call), place)
    )
    pictures = await reader.read(given, model, vision)
    return await _encode_with(call, model, text, pictures)


async def _placed_prompt(
    call: GenerationCall,
    prompt: str | list[int],
    given: Sequence[GivenPicture],
    model: TextModel,
    vision: VisionCard,
    reader: PictureReader,
) -> Prompt:
    """Builds a prompt that has the places of its pictures. Raises RequestError."""
    pictures = await reader.read(given, model, vision)
    if isinstance(prompt, str):
        return await _encode_with(call, model, prompt, pictures)
    built = await model.turns.run(len(prompt), lambda: _build(call, model, prompt))
    if pictures and vision.around:
        message = "texts come around this model's images: send the prompt as a text"
        raise RequestError("unsupported", message, param="input_ids")
    return await _with_pictures(call, model, built, pictures)


async def _encode_with(
    call: GenerationCall, model: TextModel, text: str, pictures: list[Picture]
) -> Prompt:
    """Encodes a text, and gives each picture its tokens at its place there. Raises RequestError."""
    vision = model.card.vision
    if vision is not None and pictures:
        text = spaced(text, vision, model.token(vision.spot) or "")
    prompt = await model.turns.run(len(text), lambda: _encode(call, model, text, input_field(call)))
    return await _with_pictures(call, model, prompt, pictures)


async def _with_pictures(
    call: GenerationCall, model: TextModel, prompt: Prompt, pictures: list[Picture]
) -> Prompt:
    """Gives each picture its tokens at its place. Raises RequestError (invalid, unsupported)."""
    vision = model.card.vision
    if vision is None or not pictures:
        return prompt
    # A small file may say that it is large, and is many tokens then.
    own = await model.turns.run(
        sum(vision.form.tokens(picture.grid) for picture in pictures),
        lambda: [vision.ids(picture.grid) for picture in pictures],
    )
    size = len(prompt.ids) + sum(map(len, own)) - len(own)
    if _kept(call, model, size) != slice(None):
        message = "a prompt with images is not cut"
        raise RequestError("unsupported", message, param=input_field(call))

    def put() -> tuple[list[int], list[str], list[tuple[int, int]]]:
        return placed(prompt.ids, prompt.parts, own, vision)

    try:
        ids, parts, places = await model.turns.run(size, put)
    except ValueError as error:
        message = f"{error}: a text spells an image's token, or the chat template leaves images out"
        raise RequestError("invalid", message, param=input_field(call)) from None
    spans = [
        PictureSpan(start, length, picture.digest, picture.grid, picture.pixels)
        for (start, length), picture in zip(places, pictures, strict=True)
    ]
    return msgspec.structs.replace(
        prompt, ids=ids, parts=parts, pictures=tuple(spans), files=tuple(pictures)
    )


def resolve_sampling(call: GenerationCall, model: TextModel, prompt: Prompt) -> SamplingParams:
    """The call's sampling with max_tokens set for this prompt, the model's own advice where the
    caller said nothing, and every id and number of logprobs within the vocabulary.

    Raises RequestError (context_length, invalid).
    """
    check_ids(call.sampling.stop_token_ids, model, "stop_token_ids")
    check_ids(call.sampling.logit_bias, model, "logit_bias")
    check_ids(call.sampling.allowed_token_ids, model, "allowed_token_ids")
    check_ids(call.sampling.logprob_token_ids, model, "logprob_token_ids")
    if not prompt.ids:
        message = "expected a prompt of at least one token"
        raise RequestError("invalid", message, param=input_field(call))
    card, sampling = model.card, call.sampling
    room = card.max_context - len(prompt.ids)
    if room < (1 if call.max_tokens is None else call.max_tokens):
        asked = f" and {call.max_tokens} more to generate" if call.max_tokens else ""
        raise RequestError(
            "context_length",
            f"the model's context is {card.max_context} tokens, prompt and output together; "
            f"got a prompt of {len(prompt.ids)}{asked}",
            param=input_field(call),
        )
    logprobs, read = (
        None if n is None else min(n, card.vocab_size)
        for n in (sampling.logprobs, sampling.prompt_logprobs)
    )
    advised = min(room, int(card.sampling_defaults.get("max_tokens", room)))
    suppressed = dict.fromkeys(card.suppressed_token_ids, _NEVER)
    return msgspec.structs.replace(
        sampling,
        max_tokens=advised if call.max_tokens is None else call.max_tokens,
        logit_bias={**suppressed, **sampling.logit_bias},
        logprobs=logprobs,
        prompt_logprobs=read,
    )


# The bias of a token that is never drawn, within what a worker takes.
_NEVER = -1e6
_PARAM: dict[Api, str] = {
    "lorax": "inputs",
    "completions": "prompt",
    "tokens": "token_ids",
    "chat": "messages",
    "responses": "input",
    "messages": "messages",
    "sglang": "text",
    "lmdeploy": "prompt",
    "embeddings": "input",
    "embed": "inputs",
    "classify": "input",
    "score": "documents",
    "rerank": "documents",
    "cohere_embed": "texts",
}


def input_field(call: GenerationCall) -> str:
    """Names the field of the body from which the call's prompts come."""
    if call.api in ("sglang", "lmdeploy") and any(isinstance(ids, list) for ids in call.prompts):
        return "input_ids"
    return _PARAM[call.api]


async def render_messages(
    messages: list[dict[str, Any]],
    options: TemplateOptions,
    model: TextModel,
    template: AdapterTemplate | None,
    sandbox: TemplateSandbox,
) -> Rendered:
    """Renders the prompt by the adapter's template, or else the base's. Raises RequestError
    (template_error, unsupported, invalid)."""
    if template is None:
        size = len(repr((messages, options)))
        return await model.turns.run(size, lambda: model.templates.render(messages, options))
    tokens = {**model.card.special_tokens, **template.special_tokens}
    known = {name: text for name, text in tokens.items() if text is not None}
    try:
        name = choose_template(template.sources, options.template, options.tools is not None)
        source = template.sources[name]
        return await sandbox.written(source, known, messages, options, model.turns)
    except TemplateFault as fault:
        raise template_error(fault) from fault


def unbound_hints(call: GenerationCall, prompt: Prompt, reasons: bool) -> tuple[str, ...]:
    """Fields that bound nothing, since no template read them. reasons: the model does so anyway."""
    names = _CHAT_FIELDS.get(call.api, {})
    bound = ("thinking", "thinking.budget_tokens") if reasons else ()
    fields = [field for field in prompt.rendered.unbound if field not in bound]
    return tuple(names.get(field, field) for field in fields)


# Fields of a chat, as other APIs have them.
_CHAT_FIELDS: dict[Api, dict[str, str]] = {
    "responses": {
        "messages": "input",
        "reasoning_effort": "reasoning.effort",
        "verbosity": "text.verbosity",
    },
    "messages": {
        "continue_final_message": "messages",
        "reasoning_effort": "output_config.effort",
    },
}


def _build(call: GenerationCall, model: TextModel, prompt: str | list[int]) -> Prompt:
    if isinstance(prompt, str):
        return _encode(call, model, prompt, input_field(call))
    check_ids(prompt, model, input_field(call))
    return _prompt(call, model, prompt)


def check_size(call: GenerationCall, model: TextModel, text: str, param: str) -> None:
    """Checks that a text is short enough to be encoded. Raises RequestError."""
    if call.truncate is None:
        model.check_size(text, param)
    elif len(text) > MAX_ENCODED:
        message = f"expected a text of at most {MAX_ENCODED} characters, got {len(text)}"
        raise RequestError("context_length", message, param=param)


def _encode(call: GenerationCall, model: TextModel, text: str, param: str) -> Prompt:
    check_size(call, model, text, param)
    if call.sampling.prompt_logprobs is None:
        return _prompt(call, model, model.encode(text, call.add_special_tokens), text)
    ids, parts = model.encode_parts(text, call.add_special_tokens)
    return _prompt(call, model, ids, text, parts)


def _prompt(
    call: GenerationCall,
    model: TextModel,
    ids: list[int],
    text: str | None = None,
    parts: Sequence[str] = (),
) -> Prompt:
    """Makes a prompt from its ids, which may be cut. text, parts: of a prompt that came as text.
    What is shown again of one that is cut (`echo`) is what is left of it.
    """
    kept = _kept(call, model, len(ids))
    if (_is_shown(call) and text is None) or (call.echo and len(ids[kept]) < len(ids)):
        parts = model.decode_parts(ids[kept], call.skip_special_tokens)
        text = "".join(parts)
    else:
        parts = parts[kept]
    return Prompt(text or "", ids[kept], parts, model.detokenizer(ids[kept], call))


def _is_shown(call: GenerationCall) -> bool:
    return call.echo or call.sampling.prompt_logprobs is not None


def _kept(call: GenerationCall, model: TextModel, count: int) -> slice:
    """The part of `count` tokens that truncation leaves."""
    most = call.truncate
    if most == -1:
        most = max(1, model.card.max_context - (1 if call.max_tokens is None else call.max_tokens))
    if most is None or count <= most:
        return slice(None)
    return slice(most) if call.truncate_keeps == "first" else slice(-most, None)


def check_ids(ids: "Sequence[int] | dict[int, float]", model: TextModel, param: str) -> None:
    """Checks that the model has each of the token ids. Raises RequestError (invalid)."""
    for token_id in (min(ids), max(ids)) if ids else ():
        if not model.has_token(token_id):
            raise RequestError(
                "invalid",
                f"expected token ids from 0 to {model.card.vocab_size - 1}, got {token_id}",
                param=param,
            )
