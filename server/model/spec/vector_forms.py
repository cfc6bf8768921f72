"""Vectors and scores of a model, as its files and the operator say. No torch."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from loraplex.server.config import ConfigError
from loraplex.server.model.spec.model_spec import Activation, ModelSpec
from loraplex.server.protocol import PairForm, TextPooling, VectorForm

# What Qwen3-Reranker was trained to read and to say.
_QWEN3_NAME = "qwen3-reranker"
_QWEN3_TOKENS = ("yes", "no")
_QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN3_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and"
    ' the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_MOST_PROMPT_CHARS = 1 << 14


class DenseForm(NamedTuple):
    """A product and an activation that a pooled vector goes through. path: of its folder, relative
    to the model's. activation: None = none.
    """

    path: str
    in_features: int
    out_features: int
    bias: bool
    activation: Activation | None


class SentenceFiles(NamedTuple):
    """Contents of sentence-transformers' files.

    pooling: None = the model is not for vectors. max_tokens: bound of a text; None = not said.
    prompts: put before a text, by name. yes_no: tokens whose logits say whether a document fits a
    query. dense: what a pooled vector goes through, in order.
    """

    pooling: TextPooling | None
    normalises: bool
    max_tokens: int | None
    prompts: dict[str, str]
    default_prompt: str | None
    yes_no: tuple[int, ...] = ()
    dense: tuple[DenseForm, ...] = ()

    def size(self, hidden: int) -> int:
        """Numbers of a vector. Raises ConfigError where a product takes another number."""
        for form in self.dense:
            if form.in_features != hidden:
                raise ConfigError(
                    f"{form.path}: in_features must be {hidden}, got {form.in_features}"
                )
            hidden = form.out_features
        return hidden


class PairWishes(NamedTuple):
    """Wishes of the operator for scores of documents; "" = as the model's files and name say.

    tokens: two texts with a comma between.
    """

    tokens: str = ""
    template: str = ""
    instruction: str = ""


NO_PAIR_WISHES = PairWishes()


class VectorWishes(NamedTuple):
    """Wishes of the operator for vectors; None = as the files say. prompts: NAME=TEXT."""

    pooling: TextPooling | None = None
    normalises: bool | None = None
    prompts: tuple[str, ...] = ()
    default_prompt: str = ""
    pairs: PairWishes = NO_PAIR_WISHES


NO_WISHES = VectorWishes()


def vector_form(
    model: ModelSpec, max_context: int, files: SentenceFiles | None, wishes: VectorWishes
) -> VectorForm | None:
    """Work out how a model's vectors are made. None: a classifier, which gives scores. Raises
    ConfigError.
    """
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
    told = wishes.pooling or (files.pooling if files is not None else None)
    pooling = told or ("last" if model.is_decoder else "mean")
    if model.is_causal and pooling not in ("last", "mean"):
        raise ConfigError(f"--pooling {pooling} is of models whose tokens see all others")
    normalises = wishes.normalises
    if normalises is None:
        normalises = files is None or files.pooling is None or files.normalises
    return VectorForm(
        size=model.output_size if files is None else files.size(model.output_size),
        max_tokens=most,
        pooling=pooling,
        normalises=normalises,
        prompts=prompts,
        default_prompt=default,
    )


def _prompts(texts: Sequence[str]) -> dict[str, str]:
    """Parse prompts of the form NAME=TEXT. Raises ConfigError for any other text."""
    found = {}
    for text in texts:
        name, equals, prompt = text.partition("=")
        if not name or not equals or len(prompt) > _MOST_PROMPT_CHARS:
            most = f"TEXT of at most {_MOST_PROMPT_CHARS} characters"
            raise ConfigError(f"--prompt: expected NAME=TEXT, {most}, got {text[:60]!r}")
        found[name] = prompt
    return found


def pair_form(
    model: ModelSpec,
    names: Sequence[str],
    files: SentenceFiles | None,
    wishes: PairWishes,
    token_id: Callable[[str], int | None],
) -> PairForm | None:
    """Work out how a model scores pairs of query and document. token_id: of a token's text. None:
    it gives no such score. Raises ConfigError.
    """
    is_qwen3 = any(name.rpartition("/")[2].lower().startswith(_QWEN3_NAME) for name in names)
    template = wishes.template or (_QWEN3_TEMPLATE if is_qwen3 else "")
    instruction = wishes.instruction or (_QWEN3_INSTRUCTION if is_qwen3 else "")
    _check(template, wishes)
    if model.classes is not None:
        if wishes.tokens:
            raise ConfigError("--rerank-tokens: the model is a classifier, whose head gives scores")
        is_one = len(model.classes.labels) == 1 and not model.classes.of_tokens
        return PairForm("scores", (), template, instruction) if is_one else None
    if files is not None and files.pooling is not None and not wishes.tokens:
        return PairForm("vectors")
    told = wishes.tokens or (",".join(_QWEN3_TOKENS) if is_qwen3 else "")
    ids = _ids(told, token_id) if told else (files.yes_no if files is not None else ())
    if not ids:
        return PairForm("vectors")
    if not model.writes:
        raise ConfigError("--rerank-tokens: the model has no head for text, so no token has logits")
    if not template:
        if wishes.tokens:
            raise ConfigError("--rerank-tokens: say with --rerank-template what the model reads")
        return None
    return PairForm("logits", ids, template, instruction)


def _check(template: str, wishes: PairWishes) -> None:
    """Check the template and the instruction. Raises ConfigError where they cannot be used."""
    if not template:
        if wishes.instruction:
            raise ConfigError("--rerank-instruction: no template takes it; see --rerank-template")
        return
    if template.count("{query}") != 1 or template.count("{document}") != 1:
        raise ConfigError("--rerank-template: expected {query} and {document} in it, once each")
    if len(template) > _MOST_PROMPT_CHARS:
        raise ConfigError(f"--rerank-template: at most {_MOST_PROMPT_CHARS} characters")


def _ids(tokens: str, token_id: Callable[[str], int | None]) -> tuple[int, ...]:
    """Return the ids of two tokens. Raises ConfigError where there are not two of them."""
    texts = tokens.split(",")
    ids = [found for text in texts if (found := token_id(text)) is not None]
    if len(texts) != 2 or len(set(ids)) != 2:
        raise ConfigError(
            f"--rerank-tokens: expected two tokens of the model, as yes,no; got {tokens[:60]!r}"
        )
    return tuple(ids)
