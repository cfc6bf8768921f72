"""Options from config dataclasses: their flags, variables, and values from text. Pure.

A field's metadata: `help`; `flag` (default: its name, in the singular for a list, whose flag is
repeated); `unit` ("bytes"); `secret`; `min`, `max`; `unset`, the word for None; `fixed`: no option.
"""

import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from loraplex.adapters.common.nearest import did_you_mean, nearest

PREFIX = "LORAPLEX_"
_BYTE_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True} | {
    "0": False, "false": False, "no": False, "off": False
}  # fmt: skip
MAX_PORT = 65535
# Beyond what any clock, counter or memory here takes.
_MAX_NUMBERS: Mapping[str, float] = {"int": 2**53, "float": 1e9, "bytes": 2**63 - 1}
_MOST_SHOWN = 60
_MOST_DIGITS = 40

# Options of earlier versions, each with its successor or the reason why it went.
RETIRED: Mapping[str, str] = {
    "adapter-timeout-s": "a cold adapter has 120 s",
    "adapters-at-once": "a batch has lines of 32 adapters at once",
    "batch-max-lines": "a batch has at most 50,000 lines",
    "batch-step-share": "prompts of batches have an eighth of a device's time beside others",
    "body-timeout-s": "a body has 30 s",
    "check-adapters": "adapters of --adapter are judged soon after the start",
    "concurrency": "--batch-rows of the server bounds what `loraplex batch` runs at once",
    "draft-memory": "answers that suggest drafts have 64 MiB; --max-draft 0 turns drafts off",
    "files-expire-s": "a file that says nothing else is kept for 30 days",
    "files-max-file-bytes": "a file has at most 200 MiB",
    "files-tenant-bytes": "a tenant's files have 10 GiB; the keys file may say otherwise",
    "files-tenant-count": "a tenant has 1,000 files; the keys file may say otherwise",
    "grammar-bytes": "a grammar or schema has at most 256 KiB",
    "grammar-cache": "256 compiled grammars are kept",
    "grammar-cache-bytes": "the texts of compiled grammars have 64 MiB",
    "grammar-compile-s": "compiling a grammar has 5 s",
    "grammar-mask-s": "a mask has 0.1 s",
    "grammar-memory": "compiling a grammar has 512 MiB",
    "grammar-nesting": "a grammar has 100 brackets within brackets",
    "grammar-threads": "three grammars are compiled at once",
    "head-timeout-s": "a head has 10 s",
    "idempotency-outage": "--quota-outage closed answers 503 to requests with an Idempotency-Key",
    "idempotency-ttl-s": "an answer is kept for an hour",
    "key-outage": "--quota-outage closed answers 503 to keys made by API, too",
    "max-adapter-bytes": "an adapter has at most 4 GiB as published",
    "max-connections-per-address": "a proxy in front counts the connections of an address",
    "max-connections": "a router has 8,192 connections; --max-requests bounds what they ask",
    "max-queue-bytes": "waiting prompts have 256 MiB; --max-queue bounds their number",
    "max-stop-sequences": "a request has at most 16 stop strings",
    "max-stream-buffer": "a slow reader may fall 1,024 events behind",
    "max-stream-buffer-bytes": "a slow reader may fall 8 MiB behind",
    "max-table-bytes": "an adapter's embed_tokens or lm_head has at most 2 GiB as published",
    "max-tenant-queue-bytes": "--max-tenant-queue bounds a tenant's part of the queue",
    "max-waiting": "a worker takes a quarter of --max-running beyond it; the rest waits in routers",
    "merge-timeout-s": "a merge has 10 minutes",
    "model-card": "requests wait for the first worker, and cards are kept in --cache-dir",
    "page-size": "a page of the KV cache has 16 tokens",
    "prompt-share": "prompts of one tenant have half of a device's time beside streams",
    "quarantine-s": "a request that killed workers is refused for 300 s",
    "reader-timeout-s": "an answer may be left unread for 60 s",
    "responses-tenant-bytes": "a tenant's stored answers have 256 MiB",
    "responses-tenant-count": "a tenant has 1,000 stored answers",
    "retries": "the server of `loraplex batch` tries a line as often as others are answered",
    "retry-burst": "retries after lost workers are bounded by themselves",
    "retry-share": "retries after lost workers are bounded by themselves",
    "reuse-port": "--router-processes starts several routers on one port",
    "timeout-s": "the server's --request-timeout-s bounds an answer of `loraplex batch`",
    "trace-sample": "OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG say what is traced",
    "unread-tools": "a default text describes tools to a template that reads none",
    "upload-max-bytes": "an upload has at most 4 GiB",
    "upload-tenant-bytes": "a tenant's kept versions have 64 GiB; the keys file may say otherwise",
    "upload-wait": "an upload is answered when every worker has it, or says why not",
    "worker-metrics-port": "the workers of `serve` have the ports behind --metrics-port",
    "worker-silence-s": "a worker's streams go on at another after 1 s of silence",
}

Kind = Literal["text", "int", "float", "bytes", "bool", "path", "choice"]
Value = str | int | float | bool | Path | None
Values = Value | tuple[Value, ...]


class OptionError(ValueError):
    """A bad value; str() names the option, what is expected and what was got."""


@dataclass(frozen=True, slots=True)
class Option:
    """One field of a config dataclass as users may set it."""

    field: str
    flag: str
    kind: Kind
    help: str
    default: Any
    choices: tuple[str, ...] = ()
    is_list: bool = False
    is_optional: bool = False
    unset: str = "none"  # what None is called
    is_secret: bool = False
    fallback: str = ""  # another variable that may hold a secret
    low: float = 0
    high: float = math.inf

    @property
    def variable(self) -> str:
        return PREFIX + self.flag.replace("-", "_").upper()

    @property
    def is_required(self) -> bool:
        return self.default is dataclasses.MISSING


def options_of(config: type, within: str = "") -> tuple[Option, ...]:
    """Options of a config dataclass, in the order of its fields. A dataclass in a field gives
    options that begin with the field's name. within: such a beginning."""
    hints: dict[str, type] = typing.get_type_hints(config)
    options: list[Option] = []
    for field in dataclasses.fields(config):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            options += options_of(hint, f"{within}{field.name}_")
        elif not field.metadata.get("fixed"):
            options.append(_option(field, hint, within))
    return tuple(options)


def retired(flag: str) -> str:
    """The sentence for a flag of an earlier version; "" = there was none. flag: without dashes."""
    return f"--{flag} is no option any more: {RETIRED[flag]}" if flag in RETIRED else ""


def _option(field: "dataclasses.Field[Any]", hint: Any, within: str) -> Option:
    hint, is_optional = _without_none(hint)
    is_list = typing.get_origin(hint) is tuple
    if is_list:
        hint = typing.get_args(hint)[0]
    kind = _kind(hint, field.metadata)
    name = field.name.removesuffix("s") if is_list else field.name
    return Option(
        field=within + field.name,
        flag=(within + field.metadata.get("flag", name)).replace("_", "-"),
        kind=kind,
        help=field.metadata.get("help", ""),
        default=field.default,
        choices=typing.get_args(hint) if kind == "choice" else (),
        is_list=is_list,
        is_optional=is_optional,
        unset=field.metadata.get("unset", "none"),
        is_secret=bool(field.metadata.get("secret", False)),
        fallback=field.metadata.get("fallback", ""),
        low=field.metadata.get("min", 0),
        high=field.metadata.get("max", MAX_PORT if field.name == "port" else math.inf),
    )


def _without_none(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return hint, False
    rest = [part for part in typing.get_args(hint) if part is not type(None)]
    if len(rest) != 1:
        raise TypeError(f"an option cannot have the type {hint}")
    return rest[0], True


def _kind(hint: Any, metadata: Mapping[str, Any]) -> Kind:
    if typing.get_origin(hint) is Literal:
        return "choice"
    if hint is int and metadata.get("unit") == "bytes":
        return "bytes"
    kinds: dict[Any, Kind] = {str: "text", int: "int", float: "float", bool: "bool", Path: "path"}
    if hint not in kinds:
        raise TypeError(f"an option cannot have the type {hint}")
    return kinds[hint]


# Values from text


def parse(option: Option, texts: Sequence[str], source: str) -> Values:
    """The value that `texts` (one, or one per repetition of a list's flag) give to an option.
    source: the flag or variable, for the message. Raises OptionError."""
    if option.is_list:
        return tuple(_parse_one(option, text, source) for text in texts)
    return _parse_one(option, texts[-1], source)


def _parse_one(option: Option, text: str, source: str) -> Value:
    if option.is_optional and text.strip().lower() == option.unset:
        return None
    if option.kind == "text":
        return _text(text, source)
    if option.kind == "path":
        return path_of(_text(text, source), source)
    if option.kind == "choice":
        return _choice(option, text, source)
    if option.kind == "bool":
        return _bool(text, source)
    number = _bytes(text, source) if option.kind == "bytes" else _number(option.kind, text, source)
    high = min(option.high, _MAX_NUMBERS[option.kind])
    if not option.low <= number <= high:
        bounds = f"at least {option.low:g}" if number < option.low else f"at most {high:g}"
        raise OptionError(f"{source} must be {bounds}, got {_shown(text)}")
    return number


def path_of(text: str, source: str) -> Path:
    """The path, with `~` expanded. Raises OptionError for a home that nobody has."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise OptionError(f"{source}: there is no user of that name: {_shown(text)}") from None


def _text(text: str, source: str) -> str:
    if not text.strip() or "\0" in text:
        raise OptionError(f"{source} must not be empty")
    return text


def _choice(option: Option, text: str, source: str) -> str:
    if text not in option.choices:
        raise OptionError(
            f"{source} must be one of {', '.join(option.choices)}; got {_shown(text)}"
        )
    return text


def _bool(text: str, source: str) -> bool:
    value = _BOOLEANS.get(text.strip().lower())
    if value is None:
        raise OptionError(f"{source} must be true or false, got {_shown(text)}")
    return value


def _number(kind: Kind, text: str, source: str) -> int | float:
    try:
        number = _int(text) if kind == "int" else float(text)
    except ValueError:
        expected = "a whole number" if kind == "int" else "a number"
        raise OptionError(f"{source} must be {expected}, got {_shown(text)}") from None
    if isinstance(number, float) and not math.isfinite(number):
        raise OptionError(f"{source} must be a finite number, got {_shown(text)}")
    return number


def _bytes(text: str, source: str) -> int:
    match = _BYTES.fullmatch(text.strip())
    unit = _BYTE_UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or len(match[1]) > _MOST_DIGITS:
        raise OptionError(f"{source} must be a size such as 512MiB or 2GB, got {_shown(text)}")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def _int(text: str) -> int:
    """Reads a whole number. Raises ValueError, also where it would take long to read."""
    if len(text) > _MOST_DIGITS:
        raise ValueError
    return int(text)


def _shown(text: str) -> str:
    return repr(text) if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]!r}…"


# Values to configs


def build(config: type[Any], values: Mapping[str, Values], within: str = "") -> Any:
    """A config dataclass from those of `values` that it has. within: as of `options_of`."""
    hints: dict[str, type] = typing.get_type_hints(config)
    own: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        name, hint = within + field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            own[field.name] = build(hint, values, f"{name}_")
        elif name in values:
            own[field.name] = values[name]
    return config(**own)


# Values to text


def show(option: Option, value: Value) -> str:
    """A value as one would write it."""
    if option.kind == "bytes" and isinstance(value, int):
        for unit in ("TiB", "GiB", "MiB", "KiB"):
            if value and value % _BYTE_UNITS[unit.lower()] == 0:
                return f"{value // _BYTE_UNITS[unit.lower()]}{unit}"
    return option.unset if value is None else str(value)


# The environment


def unknown_variables(environ: Iterable[str], known: Iterable[str]) -> list[str]:
    """One sentence for each LORAPLEX_ variable that is no option."""
    names = {name.removeprefix(PREFIX) for name in known}
    problems = []
    for name in sorted(environ):
        option = name.removeprefix(PREFIX)
        if option == name or option in names:
            continue
        gone = retired(option.removesuffix("_FILE").lower().replace("_", "-"))
        if gone:
            problems.append(f"{name}: {gone}")
            continue
        close = nearest(option, names)
        hint = "; see `loraplex --help`" if close is None else did_you_mean(PREFIX + close)
        problems.append(f"{name} is no option{hint}")
    return problems
