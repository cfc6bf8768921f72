"""The model card: all that a router needs of a model. Pure."""

import msgspec

from adapters.chat.conversation import DEFAULT_TEMPLATE, MessageForm


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

    @property
    def all_templates(self) -> dict[str, str]:
        """Sources of all chat templates by name."""
        default = {} if self.chat_template is None else {DEFAULT_TEMPLATE: self.chat_template}
        return default | self.named_templates
