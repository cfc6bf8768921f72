"""The model card: all that a router needs of a base model, read from its folder. No torch."""

from pathlib import Path

from tokenizers import Tokenizer

from loraplex.adapters.chat.conversation import DEFAULT_TEMPLATE
from loraplex.server.model.advice import Advice, read_advice
from loraplex.server.model.checkpoint.checkpoint import (
    GENERATION_FILE,
    CheckpointError,
    base_digest,
    read_config,
    read_optional_json,
    read_shards,
)
from loraplex.server.model.checkpoint.processor_files import FILES as PROCESSOR_FILES
from loraplex.server.model.checkpoint.processor_files import TowerForm, read_vision_card
from loraplex.server.model.checkpoint.sentence_files import read_sentence_files
from loraplex.server.model.checkpoint.tower_part import has_tower
from loraplex.server.model.spec.model_spec import ModelSpec
from loraplex.server.model.spec.vector_forms import (
    NO_WISHES,
    SentenceFiles,
    VectorWishes,
    pair_form,
    vector_form,
)
from loraplex.server.model.tokenizer.base_ends import end_token_ids
from loraplex.server.model.tokenizer.base_templates import (
    chat_templates,
    template_tokens,
    usable_templates,
)
from loraplex.server.model.tokenizer.base_tokenizer import read_tokenizer, special_token_settings
from loraplex.server.protocol import ModelCard, VisionCard


def model_card(
    folder: Path,
    *,
    names: tuple[str, ...],
    dtype: str,
    device: str,
    max_lora_rank: int,
    max_context: int | None = None,
    created: int = 0,
    wishes: VectorWishes = NO_WISHES,
) -> ModelCard:
    """The card of the model in `folder`.

    max_context: the worker's limit, where it is less than the model's. created: Unix seconds.
    wishes: of the operator. Raises CheckpointError when the model or its tokenizer cannot be
    served, ConfigError for a wish that it cannot have.
    """
    config, (tokenizer, tokenizer_json) = read_config(folder), read_tokenizer(folder)
    advice = _advice(folder, config)
    settings = special_token_settings(folder)
    templates, special_tokens = chat_templates(folder), template_tokens(settings)
    usable = usable_templates(templates, special_tokens)
    context = min(max_context or config.max_context, config.max_context)
    sentence = _sentence_files(folder)
    vectors = vector_form(config, context, sentence, wishes)
    remarks = [f"{GENERATION_FILE}: {remark}" for remark in advice.remarks]
    vision = _vision(folder, config, tokenizer, remarks)
    return ModelCard(
        base_digest=base_digest(folder),
        names=names,
        tokenizer_json=tokenizer_json,
        chat_template=templates.get(DEFAULT_TEMPLATE),
        special_tokens=special_tokens,
        eos_token_ids=end_token_ids(config, tokenizer, special_tokens, usable.values()),
        vocab_size=config.vocab_size,
        max_context=context,
        dtype=dtype,
        device=device,
        max_lora_rank=max_lora_rank,
        created=created,
        sampling_defaults=advice.defaults,
        suppressed_token_ids=advice.suppressed,
        named_templates={n: text for n, text in templates.items() if n != DEFAULT_TEMPLATE},
        message_forms={name: template.form for name, template in usable.items()},
        remarks=tuple(remarks),
        writes=config.writes,
        vectors=vectors,
        classes=config.classes,
        pad_token_id=config.pad_token_id,
        score_pooling=config.scores[0].pooling,
        token_types=config.embedding.num_types,
        pairs=pair_form(config, names, sentence, wishes.pairs, tokenizer.token_to_id),
        vision=None if isinstance(vision, str) else vision,
        blind=vision if isinstance(vision, str) else "",
        split_special_tokens=settings.get("split_special_tokens") is True,
    )


def _vision(
    folder: Path, config: ModelSpec, tokenizer: Tokenizer, remarks: list[str]
) -> VisionCard | str:
    """The way of pictures to the model. Where there is none: why not, with a remark where its files
    do not say it; "" of a model for texts."""
    pictures = config.pictures
    if pictures is None:
        return f"of {config.family} the text part is served" if config.is_text_part else ""
    if not has_tower(read_shards(folder)):
        return "the checkpoint has the text part alone"
    tower = TowerForm(pictures.columns, pictures.token_id, pictures.form, pictures.pixels)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    try:
        return read_vision_card(folder, tower, tokenizer.token_to_id, encode)
    except ValueError as error:
        remarks.append(f"{PROCESSOR_FILES[1]}: {error}; images are refused")
        return f"{PROCESSOR_FILES[1]}: {error}"


def _sentence_files(folder: Path) -> SentenceFiles | None:
    try:
        return read_sentence_files(folder)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from None


def _advice(folder: Path, config: ModelSpec) -> Advice:
    path = folder / GENERATION_FILE
    try:
        return read_advice(read_optional_json(path), config.vocab_size, config.max_context)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
