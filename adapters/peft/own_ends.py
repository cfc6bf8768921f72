"""The tokens that an adapter's files name as the end of an answer. Pure.

What its chat template closes a turn with is found where templates are rendered, not here.
"""

from collections.abc import Mapping
from typing import Any

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.common.strict_json import StrictJsonError, decode_object
from loraplex.adapters.peft.special_tokens import special_tokens
from loraplex.adapters.violations import Findings, shown

GENERATION_FILE = "generation_config.json"
MAX_GENERATION_BYTES = 1 << 20
MAX_ENDS = 64


def own_ends(
    generation: bytes | None, settings: Mapping[str, Any], base: BaseSpec, findings: Findings
) -> tuple[int, ...]:
    """Ids that end an answer of the adapter and are no ends of the base, ascending.

    generation: `generation_config.json`, of which `eos_token_id` alone is read. settings:
    `tokenizer_config.json`, of which `eos_token` is; a text that is no token of the base ends
    nothing. An inferred base has no known ends to compare with.
    """
    named = _of_generation(generation, base, findings)
    text = end_token_of(settings)
    if text is not None and base.tokens and text in base.tokens:
        named.add(base.tokens[text])
    own = sorted(named.difference(base.eos_token_ids))
    if len(own) > MAX_ENDS:
        message = f"{len(own)} tokens are named as ends of an answer; at most {MAX_ENDS} may be"
        findings.add("bad_generation_config", GENERATION_FILE, message)
    return () if base.is_inferred else tuple(own)


def end_token_of(settings: Mapping[str, Any]) -> str | None:
    """The text of `eos_token`, if the file names one that can be read."""
    named = {name: settings[name] for name in ("eos_token",) if name in settings}
    try:
        return special_tokens(named).get("eos_token") or None
    except ValueError:
        return None


def _of_generation(data: bytes | None, base: BaseSpec, findings: Findings) -> set[int]:
    if data is None:
        return set()
    try:
        value = decode_object(data).get("eos_token_id")
    except StrictJsonError as error:
        findings.add("bad_generation_config", GENERATION_FILE, f"{GENERATION_FILE} is {error}")
        return set()
    ids = value if isinstance(value, list) else [] if value is None else [value]
    most = base.most_ids if base.vocab_size else 1 << 31  # of an inferred base it may be unknown
    if all(type(i) is int and 0 <= i < most for i in ids):
        return set(ids)
    message = f"eos_token_id: expected ids from 0 to {most - 1}, got {shown(value)}"
    findings.add("bad_generation_config", GENERATION_FILE, message)
    return set()
