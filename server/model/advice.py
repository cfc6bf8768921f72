"""Advice of a base's authors on drawing tokens, as transformers' `generate` follows it. Pure.

Values of `generation_config.json` that narrow a draw hold only with `do_sample`; the others always.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

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
