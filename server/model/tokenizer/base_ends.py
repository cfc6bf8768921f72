"""The tokens that a base's files name as the end of an answer. No torch."""

from collections.abc import Collection, Iterator, Mapping

from tokenizers import Tokenizer

from loraplex.adapters.chat.conversation import PROBES, TemplateFault, turn_ends
from loraplex.adapters.chat.template import ChatTemplate
from loraplex.server.model.spec.model_spec import ModelSpec


def end_token_ids(
    config: ModelSpec,
    tokenizer: Tokenizer,
    special_tokens: Mapping[str, str],
    templates: Collection[ChatTemplate],
) -> tuple[int, ...]:
    """Ids of `generation_config.json`, where it names none of `config.json`; of `eos_token`; and of
    what the templates close an assistant's turn with."""
    named = tokenizer.token_to_id(special_tokens.get("eos_token", ""))
    found = [*config.eos_token_ids, *([] if named is None else [named])]
    added = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
    for template in templates:
        found += turn_ends(list(_rendered(template)), added)
    return tuple(i for i in dict.fromkeys(found) if i < config.vocab_size)


def _rendered(template: ChatTemplate) -> Iterator[str | None]:
    for probe in PROBES:
        try:
            yield template.render(probe.messages, probe.options)
        except TemplateFault:
            yield None
