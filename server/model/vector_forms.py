"""What a model gives beside text: its files' word, and the operator's. No torch."""

from collections.abc import Sequence
from typing import NamedTuple

from loraplex.server.config import ConfigError
from loraplex.server.model.checkpoint.sentence_files import SentenceFiles
from loraplex.server.model.pair_forms import NO_PAIR_WISHES, PairWishes
from loraplex.server.model.spec import ModelSpec
from loraplex.server.protocol import Pooling, VectorForm

_MOST_PROMPT_CHARS = 1 << 14


class VectorWishes(NamedTuple):
    """What the operator says of vectors; None = as the files say. prompts: NAME=TEXT. pairs: of
    scores of documents."""

    pooling: Pooling | None = None
    normalises: bool | None = None
    prompts: tuple[str, ...] = ()
    default_prompt: str = ""
    pairs: PairWishes = NO_PAIR_WISHES


NO_WISHES = VectorWishes()


def vector_form(
    model: ModelSpec, max_context: int, files: SentenceFiles | None, wishes: VectorWishes
) -> VectorForm | None:
    """None: a classifier, which gives scores. Raises ConfigError."""
    if model.classes is not None:
        if wishes._replace(pairs=NO_PAIR_WISHES) != NO_WISHES:
            raise ConfigError(
                "--pooling, --normalize, --prompt and --default-prompt are of models that give"
                " vectors; this one is a classifier"
            )
        return None
    prompts = {**({} if files is None else files.prompts), **_prompts(wishes.prompts)}
    default = wishes.default_prompt or (None if files is None else files.default_prompt)
    if default is not None and default not in prompts:
        known = ", ".join(map(repr, prompts)) or "none"
        raise ConfigError(f"--default-prompt: there is no prompt {default!r}; there are: {known}")
    most = max_context if files is None else min(files.max_tokens or max_context, max_context)
    pools = files is not None and files.pooling is not None
    return VectorForm(
        size=model.hidden_size,
        max_tokens=most,
        pooling=wishes.pooling or (files.pooling if files is not None else None) or "last",
        normalises=_first(wishes.normalises, files.normalises if files and pools else True),
        prompts=prompts,
        default_prompt=default,
    )


def _prompts(texts: Sequence[str]) -> dict[str, str]:
    """Raises ConfigError."""
    found = {}
    for text in texts:
        name, equals, prompt = text.partition("=")
        if not name or not equals or len(prompt) > _MOST_PROMPT_CHARS:
            most = f"TEXT of at most {_MOST_PROMPT_CHARS} characters"
            raise ConfigError(f"--prompt: expected NAME=TEXT, {most}, got {text[:60]!r}")
        found[name] = prompt
    return found


def _first(wish: bool | None, usual: bool) -> bool:
    return usual if wish is None else wish
