"""Bodies and answers of `/tokenize`, `/detokenize` and `/tokenizer_info`. Pure.

`/tokenize` takes LoRAX's shape and vLLM's two. The latter are the bodies of OpenAI's routes with a
field more, so that their prompts become ids in the same way.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from loraplex.router.api.openai.chat import ChatBody
from loraplex.router.api.openai.chat import request_of as chat_request
from loraplex.router.api.openai.common import decode_openai
from loraplex.router.api.openai.completions import CompletionsBody
from loraplex.router.api.openai.completions import request_of as completions_request
from loraplex.router.api.request.body import decode_plain, typed
from loraplex.router.api.request.fields import NonNegative
from loraplex.router.api.request.formatter import ApiLimits
from loraplex.router.api.request.known_elsewhere import check_unknown_parts
from loraplex.router.call import GenerationCall
from loraplex.router.text.tokenizer_json import AddedToken
from loraplex.server.protocol import ModelCard, SamplingParams

# Characters of a text, and tokens of one. A token takes several hundred bytes of memory.
MAX_TOKENIZED = 1 << 19

Shape = Literal["inputs", "prompt", "messages"]
SHAPES: tuple[Shape, ...] = ("inputs", "prompt", "messages")
T = TypeVar("T", bound=msgspec.Struct)
Text = Annotated[str, Meta(max_length=MAX_TOKENIZED)]


class TokenizeBody(msgspec.Struct, frozen=True):
    """LoRAX's request of `/tokenize`. add_special_tokens: true by default."""

    inputs: Annotated[str, Meta(min_length=1, max_length=MAX_TOKENIZED)]
    add_special_tokens: bool | None = None


class TokenizePromptBody(CompletionsBody, frozen=True, kw_only=True):
    """Body of vLLM's request to tokenise a text."""

    prompt: Text
    return_token_strs: bool | None = None


class TokenizeChatBody(ChatBody, frozen=True, kw_only=True):
    """Body of vLLM's request to tokenise a chat."""

    return_token_strs: bool | None = None


class TokenObject(msgspec.Struct, frozen=True):
    """A token in LoRAX's shape. start, stop: characters of the text that the token covers."""

    id: int
    text: str
    start: int
    stop: int


class TokenizedPrompt(msgspec.Struct, frozen=True):
    """The ids of a prompt, in vLLM's shape. token_strs: as the vocabulary spells them, if they were
    asked for.
    """

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeBody(msgspec.Struct, frozen=True):
    """Body of a request to `/detokenize`. model: as of a completion; absent = the base."""

    tokens: Annotated[list[NonNegative], Meta(max_length=MAX_TOKENIZED)]
    model: str | None = None


class DetokenizedText(msgspec.Struct, frozen=True):
    """Answer to a request to `/detokenize`. prompt: the text, special tokens spelled out."""

    prompt: str


class TokenizerInfo(msgspec.Struct, frozen=True):
    """The base's, by the names that tokenizer_config.json has. added_tokens_decoder: by id."""

    tokenizer_class: str
    model_max_length: int
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    additional_special_tokens: list[str]
    added_tokens_decoder: dict[str, AddedToken]
    clean_up_tokenization_spaces: bool = False


class IdsAsked(msgspec.Struct, frozen=True):
    """Request for ids in vLLM's shape, as it was read. call: what a generation would run."""

    call: GenerationCall
    with_strings: bool


def parse_inputs(plain: dict[str, Any]) -> tuple[str, bool]:
    """Reads LoRAX's shape: the text, and whether it gets special tokens. Raises RequestError."""
    request = _closed(plain, TokenizeBody)
    return request.inputs, request.add_special_tokens is not False


def parse_prompt(body: bytes, limits: ApiLimits, bearer: str | None) -> IdsAsked:
    """Reads a request to tokenise a prompt. Raises RequestError."""
    request = decode_openai(body, TokenizePromptBody, limits)
    call = completions_request(request, limits, bearer).call
    return IdsAsked(call, bool(request.return_token_strs))


def parse_messages(body: bytes, limits: ApiLimits, bearer: str | None) -> IdsAsked:
    """Reads a request to tokenise a chat. Raises RequestError."""
    request = decode_openai(body, TokenizeChatBody, limits)
    call = chat_request(request, limits, bearer).call
    return IdsAsked(call, bool(request.return_token_strs))


def drawn(call: GenerationCall, sampling: SamplingParams) -> dict[str, Any]:
    """Returns how a generation is drawn, by vLLM's names."""
    same = {*SamplingParams.__struct_fields__} & {*CompletionsBody.__struct_fields__}
    own = {name: getattr(call, name) for name in ("n", "seed", "stop", "bad_words")}
    return {"sampling_params": {name: getattr(sampling, name) for name in sorted(same)} | own}


def parse_detokenize(
    body: bytes, limits: ApiLimits, bearer: str | None
) -> tuple[list[int], GenerationCall]:
    """Reads token ids, and a call without prompts that names the model. Raises RequestError."""
    request = _closed(decode_plain(body), DetokenizeBody)
    named = CompletionsBody(model=request.model, prompt="")
    call = completions_request(named, limits, bearer).call
    return request.tokens, msgspec.structs.replace(call, prompts=())


def tokenizer_info(card: ModelCard, added: Mapping[int, AddedToken]) -> TokenizerInfo:
    """Describes the base's tokenizer and its special tokens. added: by id."""
    named = card.special_tokens
    others = [token.content for token in added.values() if token.special]
    return TokenizerInfo(
        tokenizer_class="PreTrainedTokenizerFast",
        model_max_length=card.max_context,
        chat_template=card.chat_template,
        bos_token=named.get("bos_token"),
        eos_token=named.get("eos_token"),
        pad_token=named.get("pad_token"),
        unk_token=named.get("unk_token"),
        additional_special_tokens=[text for text in others if text not in named.values()],
        added_tokens_decoder={str(i): token for i, token in sorted(added.items())},
    )


def _closed(plain: dict[str, Any], kind: type[T]) -> T:
    """Converts a body to `kind`; null is absent. Raises RequestError, for other fields, too."""
    check_unknown_parts(plain, kind.__struct_fields__, "")
    return typed(plain, kind)
