"""The model card: all that a router needs of a model. Pure."""

from typing import Literal

import msgspec

from loraplex.adapters.chat.conversation import DEFAULT_TEMPLATE, MessageForm
from loraplex.adapters.classes import ClassForm as ClassForm
from loraplex.adapters.classes import OwnClasses
from loraplex.server.protocol.generation import Pooling

# What a model gives: the last are scores of documents.
Gift = Literal["text", "vectors", "classes", "fits"]


class VectorForm(msgspec.Struct, frozen=True):
    """How texts become vectors. size: numbers of one. max_tokens: of a text, with its prompt.
    prompts: what may be put before a text, by name; default_prompt: the one that is, where a
    request names none."""

    size: int
    max_tokens: int
    pooling: Pooling = "last"
    normalises: bool = True
    prompts: dict[str, str] = {}
    default_prompt: str | None = None


class PairForm(msgspec.Struct, frozen=True):
    """How a model says how well a document fits a query: by a classifier's one score, by the logits
    of two tokens, or by the angle between two vectors.

    token_ids: of a fit, and of none. template: what is read, with `{query}`, `{document}` and
    perhaps `{instruction}`; "" = the tokenizer's own pair. instruction: where a request has none.
    """

    by: Literal["scores", "logits", "vectors"]
    token_ids: tuple[int, ...] = ()
    template: str = ""
    instruction: str = ""


class ModelCard(msgspec.Struct, frozen=True):
    """All that a router needs of a model, fetched once over HTTP as JSON and cached by its digest.

    names: what `model` may say for the base itself; the first is shown. listed: those that
    `/v1/models` lists; () = the first. root: what the model is called where it comes from.
    tokenizer_json: the tokenizer's file, whole. chat_template: Jinja source, or None.
    named_templates: those that are not the default, by name. message_forms: how each template
    reads messages, the default by the name `default`; those left out cannot be used.
    special_tokens: `bos_token` and the like, by all names that the template may use.
    eos_token_ids: what ends its answers. max_context: prompt and output together.
    sampling_defaults: its authors' advice, by names of SamplingParams; suppressed_token_ids are
    never drawn. remarks: on advice that is not followed. weights: how they are quantised, "" = not.
    writes: whether it gives text. vectors, classes, pairs: how it gives those; None = it does not.
    pad_token_id: see `ClassForm`.
    """

    base_digest: str
    names: tuple[str, ...]
    tokenizer_json: str
    chat_template: str | None
    special_tokens: dict[str, str]
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_context: int
    dtype: str
    device: str
    max_lora_rank: int
    created: int = 0
    sampling_defaults: dict[str, float] = {}
    named_templates: dict[str, str] = {}
    message_forms: dict[str, MessageForm] = {}
    listed: tuple[str, ...] = ()
    root: str = ""
    suppressed_token_ids: tuple[int, ...] = ()
    remarks: tuple[str, ...] = ()
    weights: str = ""
    writes: bool = True
    vectors: VectorForm | None = None
    classes: ClassForm | None = None
    pairs: PairForm | None = None
    pad_token_id: int | None = None

    def with_head(self, own: OwnClasses) -> "ModelCard":
        """The card of the model under an adapter with a score head of its own: a classifier."""
        classes = own.over(self.classes, self.pad_token_id)
        form = PairForm("scores") if self.pairs is None else self.pairs
        pairs = PairForm("scores", (), form.template, form.instruction) if own.count == 1 else None
        return msgspec.structs.replace(
            self, writes=False, vectors=None, classes=classes, pairs=pairs
        )

    @property
    def gives(self) -> tuple[Gift, ...]:
        """The kinds of answers that may be asked for."""
        gifts: dict[Gift, bool] = {
            "text": self.writes,
            "vectors": self.vectors is not None,
            "classes": self.classes is not None,
            "fits": self.pairs is not None,
        }
        return tuple(gift for gift, is_given in gifts.items() if is_given)

    @property
    def all_templates(self) -> dict[str, str]:
        """Sources of all chat templates by name."""
        default = {} if self.chat_template is None else {DEFAULT_TEMPLATE: self.chat_template}
        return default | self.named_templates
