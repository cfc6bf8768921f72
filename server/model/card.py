"""The model card: all that a router needs of a base model, read from its folder. No torch.

Advice on drawing tokens holds as in transformers' `generate`: values of `generation_config.json`
that narrow a draw hold only with `do_sample`; the others always.
"""

import mmap
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from tokenizers import Tokenizer

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.chat.conversation import DEFAULT_TEMPLATE
from loraplex.adapters.safetensors.floats import float_digest
from loraplex.server.model.checkpoint.checkpoint import (
    GENERATION_FILE,
    CheckpointError,
    ModelFile,
    base_digest,
    model_shards,
    read_config,
    read_optional_json,
    read_shards,
    stored_tensors,
    tables,
)
from loraplex.server.model.checkpoint.processor_files import FILES as PROCESSOR_FILES
from loraplex.server.model.checkpoint.processor_files import TowerForm, read_vision_card
from loraplex.server.model.checkpoint.sentence_files import read_sentence_files
from loraplex.server.model.checkpoint.stored_forms import stored_forms
from loraplex.server.model.checkpoint.tower_part import has_tower
from loraplex.server.model.spec.base_spec import base_spec
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
from loraplex.server.model.tokenizer.base_tokenizer import (
    has_tokenizer,
    read_tokenizer,
    special_token_settings,
)
from loraplex.server.protocol import ModelCard, VisionCard

# Name -> the least and the largest value.
_SAMPLING = {
    "temperature": (0, 1e4),
    "top_k": (0, 2.0**31 - 1),
    "min_p": (0, 1.0),
    "top_p": (0, 1.0),
    "typical_p": (0, 1.0),
}
_ALWAYS = {"repetition_penalty": (1e-3, 1e3)}
_MORE_THAN_LEAST = ("top_p", "typical_p")
# Counts of new tokens -> the name here, and the least value.
_COUNTS = {"min_new_tokens": ("min_tokens", 0), "max_new_tokens": ("max_tokens", 1)}
_MAX_SUPPRESSED = 1024
# What is not followed -> the values that ask for nothing.
_SAMPLING_IGNORED: dict[str, tuple[Any, ...]] = {
    "top_h": (),
    "epsilon_cutoff": (0, 1),
    "eta_cutoff": (0, 1),
}
_ALWAYS_IGNORED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "guidance_scale": (1,),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "max_time": (),
    "stop_strings": ([], ""),
    "bad_words_ids": ([],),
    "force_words_ids": ([],),
    "constraints": ([],),
    "sequence_bias": ([], {}),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": ([],),
    "watermarking_config": ({},),
    "dola_layers": (),
    "token_healing": (False,),
}

_THREADS = 16
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


class Advice(NamedTuple):
    """Advice of a model's files on sampling. defaults: by names of SamplingParams. suppressed: ids
    that are never drawn.

    remarks: a sentence on each thing in the file that is not followed.
    """

    defaults: dict[str, float]
    suppressed: tuple[int, ...]
    remarks: tuple[str, ...]


def read_advice(generation: Mapping[str, Any], vocab_size: int, max_context: int) -> Advice:
    """Read the sampling defaults that a model comes with. generation: `generation_config.json`.
    Raises ValueError for what nothing can be drawn by.
    """
    samples = bool(generation.get("do_sample"))
    held = {**_ALWAYS, **(_SAMPLING if samples else {})}
    defaults = {
        name: _number(generation[name], name, *held[name]) for name in _given(generation, held)
    }
    for name in _given(generation, _COUNTS):
        known_as, least = _COUNTS[name]
        defaults[known_as] = _count(generation[name], name, least)
    remarks = _ignored(generation, samples)
    remarks += _without_effect(generation, {} if samples else _SAMPLING)
    remarks += _too_short(generation, max_context)
    return Advice(defaults, _suppressed(generation, vocab_size), tuple(remarks))


def _given(generation: Mapping[str, Any], names: Mapping[str, Any]) -> list[str]:
    return [name for name in names if generation.get(name) is not None]


def _number(value: object, name: str, least: float, most: float) -> float:
    if name == "top_k" and value == -1:  # all tokens, as in other engines
        return 0.0
    above = name in _MORE_THAN_LEAST
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and (least < value <= most or (value == least and not above))
    ):
        return float(value)
    bound = "more than" if above else "at least"
    raise ValueError(f"{name} must be {bound} {least:g}, at most {most:g}: {value}")


def _count(value: object, name: str, least: int) -> float:
    if type(value) is not int or not least <= value < 1 << 31:
        raise ValueError(f"{name} must be a number of tokens, at least {least}: {value}")
    return float(value)


def _suppressed(generation: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Ids outside the vocabulary suppress nothing."""
    ids = generation.get("suppress_tokens") or []
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ValueError(f"suppress_tokens must be a list of ids: {str(ids)[:100]}")
    found = tuple(sorted({i for i in ids if 0 <= i < vocab_size}))
    if len(found) > _MAX_SUPPRESSED:
        raise ValueError(f"suppress_tokens may be at most {_MAX_SUPPRESSED} ids: {len(found)}")
    return found


def _ignored(generation: Mapping[str, Any], samples: bool) -> list[str]:
    ignored = {**_ALWAYS_IGNORED, **(_SAMPLING_IGNORED if samples else {})}
    if "min_new_tokens" in _given(generation, _COUNTS):
        del ignored["min_length"]  # which is then void
    if samples or not (generation.get("top_k") or 0) > 1:
        del ignored["penalty_alpha"]  # which means something to contrastive search alone
    asked = [name for name in _given(generation, ignored) if generation[name] not in ignored[name]]
    return [
        f"{name} = {str(generation[name])[:100]} is not followed; transformers' generate would"
        for name in asked
    ]


def _without_effect(generation: Mapping[str, Any], names: Mapping[str, Any]) -> list[str]:
    given = _given(generation, names)
    if not given:
        return []
    return [f"{', '.join(given)} mean nothing without do_sample, as in transformers' generate"]


def _too_short(generation: Mapping[str, Any], max_context: int) -> list[str]:
    value = generation.get("max_length")
    if type(value) is not int or value >= max_context or generation.get("max_new_tokens"):
        return []
    return [f"max_length = {value} is not followed: the context of {max_context} tokens is the end"]


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


def read_base_spec(folder: Path, names: tuple[str, ...]) -> BaseSpec:
    """Facts about the model that adapters are validated against.

    The embeddings are read once, for their digests. Raises CheckpointError, also for a tied head
    that is stored and is another.
    """
    model = read_config(folder)
    if model.pictures is not None and not has_tower(read_shards(folder)):
        model = replace(model, pictures=None)
    read = model_shards(folder, model)
    shards = {name: shard for shard in read for name in shard.tensors}
    names_of = {"embed_tokens": tables(shards, model)[0], "lm_head": tables(shards, model)[-1]}
    if model.head.linear.parts[0].path in stored_forms(model, stored_tensors(read)):
        del names_of["lm_head"]  # no adapter holds a copy of what is quantised
    elif model.head.linear.bias:
        names_of["lm_head.bias"] = f"{model.head.linear.parts[0].path}.bias"
    tensors = tuple(dict.fromkeys(names_of.values()))
    with ThreadPoolExecutor(_THREADS) as threads:  # a gigabyte each, at the start
        found = {name: _digest(shards, name, threads) for name in tensors}
    digests = {module: found[name] for module, name in names_of.items()}
    if model.head.tied and digests.get("lm_head") not in (None, digests["embed_tokens"]):
        raise CheckpointError(
            f"{folder}: config.json ties lm_head to embed_tokens, but the weights hold a different"
            f" {model.head.tensor}; set tie_word_embeddings to false to use it, or remove it"
        )
    digest = base_digest(folder)
    if not has_tokenizer(folder):
        return base_spec(model, digest, names, digests, None, model.eos_token_ids)
    tokenizer, _ = read_tokenizer(folder)
    special = template_tokens(special_token_settings(folder))
    templates = usable_templates(chat_templates(folder), special)
    ends = end_token_ids(model, tokenizer, special, templates.values())
    return base_spec(model, digest, names, digests, tokenizer.get_vocab(), ends)


def _digest(shards: Mapping[str, ModelFile], name: str, threads: ThreadPoolExecutor) -> str:
    shard = shards.get(name)
    if shard is None or shard.tensors[name].dtype not in _FLOAT_DTYPES:
        raise CheckpointError(f"the model's weights have no {name} in floating point")
    tensor = shard.tensors[name]
    with shard.path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        raw = np.frombuffer(mapped, np.uint8)[tensor.start : tensor.end]
        return float_digest(raw, tensor.dtype, threads.map)
