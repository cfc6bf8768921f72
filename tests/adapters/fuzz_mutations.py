"""Seeded mutations of an adapter's config, weights and tokenizer files, most still well-formed."""

import json
import random
import struct
from collections.abc import Callable
from typing import Any

from loraplex.adapters.peft.config import HARMLESS, REFUSED, USED
from tests.adapter_folders import raw_safetensors

Files = dict[str, bytes]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "chat_template.jinja",
)
_KEYS = sorted(USED | HARMLESS | frozenset(REFUSED)) + ["", "__proto__", "\ud800", "x" * 2000]
_NUMBERS: list[Any] = [
    0,
    1,
    -1,
    7,
    8,
    2**31,
    2**53 + 1,
    2**63,
    2**64,
    -(2**64),
    10**300,
    0.5,
    1e308,
]
_TEXTS = [
    "", "none", "all", "LORA", "q_proj", "all-linear", "ALL-LINEAR", "org/base", "x" * 5000,
    "\0", "\x1b[2J", "\u202eq_proj", "\ud800", "\u0660", "../../etc/passwd", "/dev/zero",
    "F8_E4M3", "I8", "F64", "BOOL", ".*", "(a|a)*b", "(.?){250}", "((((", "[z-a]", "a{1,256}",
    "(?i)x", "\\", "[^", "(.*)*" * 30, "{{7*7}}", "{% for i in range(10**9) %}{% endfor %}",
]  # fmt: skip
_SPLICES = [
    b"NaN", b"Infinity", b"1e999", b"-", b"9" * 5000, b"[" * 3000, b'{"a":' * 300, b"\xff", b"\0",
    b"\xef\xbb\xbf", b'"a":1,"a":2,', b"null", b"true", b"{}", b"[]", b'"', b"\\u0000", b"//",
]  # fmt: skip


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value, the odd ones more often."""
    kind = rng.randrange(8 if depth < 3 else 5)
    if kind < 2:
        return rng.choice(_NUMBERS)
    if kind < 4:
        return rng.choice(_TEXTS)
    if kind == 4:
        return rng.choice([None, True, False, [], {}, [[]]])
    if kind == 5:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 6:
        return {rng.choice(_KEYS + _TEXTS): value(rng, depth + 1) for _ in range(rng.randrange(4))}
    nested: Any = 1
    for _ in range(rng.choice([2, 31, 32, 33, 500])):
        nested = [nested] if rng.random() < 0.5 else {"a": nested}
    return nested


def mutate(files: Files, rng: random.Random) -> Files:
    """The files, changed in one to four ways."""
    changed = dict(files)
    for _ in range(rng.choice([1, 1, 2, 4])):
        rng.choice(_WAYS)(changed, rng)
    return changed


def _config_value(files: Files, rng: random.Random) -> None:
    found = _object(files[CONFIG])
    found[rng.choice(_KEYS)] = value(rng)
    files[CONFIG] = _dump(found, rng)


def _config_key_gone(files: Files, rng: random.Random) -> None:
    found = _object(files[CONFIG])
    found.pop(rng.choice(sorted(found)), None) if found else None
    files[CONFIG] = _dump(found, rng)


def _config_patterns(files: Files, rng: random.Random) -> None:
    found = _object(files[CONFIG])
    for key in ("rank_pattern", "alpha_pattern"):
        names = [_pattern(rng) for _ in range(rng.randrange(6))]
        found[key] = {name: rng.choice([1, 2, 4, 8, 300]) for name in names}
    found[rng.choice(["target_modules", "exclude_modules", "layers_pattern"])] = _pattern(rng)
    files[CONFIG] = _dump(found, rng)


def _pattern(rng: random.Random) -> str:
    parts = [
        "q_proj",
        ".*",
        "(",
        ")",
        "|",
        "[a-z]",
        "+",
        "?",
        "{2,9}",
        "{250}",
        "\\d",
        "layers",
        ".",
    ]
    return "".join(rng.choice(parts) for _ in range(rng.randrange(1, 40)))


def _header_entry(files: Files, rng: random.Random) -> None:
    def change(header: dict[str, Any]) -> None:
        entry = header[rng.choice(sorted(header))] if header else None
        if isinstance(entry, dict):
            entry[rng.choice(["dtype", "shape", "data_offsets", "extra"])] = value(rng)

    _header(files, rng, change)


def _header_numbers(files: Files, rng: random.Random) -> None:
    """Nearly right: a dimension or an offset is another."""

    def change(header: dict[str, Any]) -> None:
        entry = header[rng.choice(sorted(header))] if header else None
        numbers = (
            entry.get(rng.choice(["shape", "data_offsets"])) if isinstance(entry, dict) else None
        )
        if isinstance(numbers, list) and numbers:
            numbers[rng.randrange(len(numbers))] = rng.choice(
                [0, 4, 8, 1024, 2**40, 2**62, 10**4000]
            )

    _header(files, rng, change)


def _header_names(files: Files, rng: random.Random) -> None:
    def change(header: dict[str, Any]) -> None:
        if not header:
            return
        name = rng.choice(sorted(header))
        entry = header.pop(name)
        old, new = (
            rng.choice(["lora_A", "q_proj", "layers.0", "base_model", "."]),
            rng.choice(_TEXTS),
        )
        header[name.replace(old, new) if rng.random() < 0.7 else new] = entry

    _header(files, rng, change)


def _header_many(files: Files, rng: random.Random) -> None:
    def change(header: dict[str, Any]) -> None:
        for number in range(rng.choice([50, 3000, 25_000])):
            header[f"t{number}"] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}

    _header(files, rng, change)


def _header_length(files: Files, rng: random.Random) -> None:
    size = rng.choice([0, 1, 7, 8, 100, 1 << 20, 8 << 20, 1 << 31, (1 << 63) - 1, (1 << 64) - 1])
    files[WEIGHTS] = struct.pack("<Q", size) + files[WEIGHTS][8:]


def _numbers(files: Files, rng: random.Random) -> None:
    """Any bytes as floats: NaN and infinities among them."""
    data = bytearray(files[WEIGHTS])
    for _ in range(rng.choice([1, 4, 64])):
        if len(data) > 4:
            data[-rng.randrange(1, min(len(data), 4096))] = rng.choice([0, 0x7F, 0x80, 0xFF])
    files[WEIGHTS] = bytes(data)


def _tokenizer(files: Files, rng: random.Random) -> None:
    found = {rng.choice(["model", "added_tokens", "chat_template", "x"]): value(rng)}
    if rng.random() < 0.5:
        found["model"] = {"vocab": value(rng)}
    files[rng.choice(_TOKENIZERS)] = _dump(found, rng)


def _bytes(files: Files, rng: random.Random) -> None:
    """Flips, cuts, doubles and splices, mostly where the structure lies."""
    name = rng.choice(sorted(files))
    data = bytearray(files[name])
    for _ in range(rng.choice([1, 2, 8])):
        at = rng.randrange(min(len(data), 3000) + 1)
        kind = rng.randrange(5)
        if kind == 0 and data:
            data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at:at] = rng.choice(_SPLICES)
        elif kind == 2:
            del data[at : at + rng.randrange(1, 40)]
        elif kind == 3:
            data[at:at] = data[at : at + rng.randrange(1, 200)]
        else:
            del data[rng.randrange(len(data) + 1) :]
    files[name] = bytes(data)


def _header(files: Files, rng: random.Random, change: Callable[[dict[str, Any]], None]) -> None:
    data = files[WEIGHTS]
    start = 8 + int.from_bytes(data[:8], "little")
    header = _object(data[8:start]) if start <= len(data) else {}
    change(header)
    files[WEIGHTS] = raw_safetensors(_dump(header, rng), data[start:])


def _object(data: bytes) -> dict[str, Any]:
    """{} for what an earlier mutation has broken."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _dump(found: dict[str, Any], rng: random.Random) -> bytes:
    """In one of the spellings that JSON has; now and then with a key twice."""
    text = json.dumps(found, indent=rng.choice([None, None, 2]))
    if rng.random() < 0.05 and found:
        text = "{" + json.dumps(next(iter(found))) + ": 1, " + text[1:]
    return text.encode()


_WAYS: tuple[Callable[[Files, random.Random], None], ...] = (
    _config_value,
    _config_value,
    _config_key_gone,
    _config_patterns,
    _header_entry,
    _header_numbers,
    _header_names,
    _header_many,
    _header_length,
    _numbers,
    _tokenizer,
    _bytes,
    _bytes,
    _bytes,
)
