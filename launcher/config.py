"""The only place that reads the environment: LORAPLEX_* variables, secrets, those of children."""

import os
from argparse import Namespace
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from loraplex.adapters.errors import AdapterError
from loraplex.launcher.command_line import GROUPS
from loraplex.launcher.options import (
    PREFIX,
    Option,
    OptionError,
    Values,
    options_of,
    parse,
    path_of,
    unknown_variables,
)
from loraplex.launcher.worker_groups import AskedGroups
from loraplex.router.config import RouterConfig, RouterConfigError
from loraplex.server.config import WorkerConfig

_MAX_SECRET_BYTES = 4096

T = TypeVar("T")

WORKER_OPTIONS = options_of(WorkerConfig)
ROUTER_OPTIONS = options_of(RouterConfig)
GROUP_OPTIONS = options_of(AskedGroups)
API_KEY = Option("api_key", "api-key", "text", "a caller's key", default="", is_secret=True)


def encode_inline() -> None:
    """Keep the tokenizer off threads of its own: the router gives it one text at a time. The
    library takes the setting from nowhere else."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def environment(moved: Mapping[str, str]) -> Mapping[str, str]:
    """The environment. moved: variables to be set first, for this process and its children."""
    os.environ.update(moved)
    return dict(os.environ)


def serve_options() -> tuple[Option, ...]:
    """List what `serve` takes: options of the router, of workers and its own, but no wiring.

    Where both have an option, one value serves both, but for the address, which is the router's.
    """
    wiring = {"workers", "bases", "secret", "worker_id", "advertise"}
    router = {option.field: option for option in ROUTER_OPTIONS if option.field not in wiring}
    worker = {option.field: option for option in WORKER_OPTIONS if option.field not in wiring}
    address = {name: router[name] for name in ("host", "port", "redis")}
    own = {option.field: option for option in GROUP_OPTIONS}
    return tuple((router | worker | address | own).values())


def batch_options() -> tuple[Option, ...]:
    """List options of a server that `batch` starts: those of `serve`, but not who may reach it. It
    has no other callers, so more of a batch runs at once."""
    reach = {"host", "port", "uds", "tls_cert", "tls_key", "auth", "keys_file"}
    options = (option for option in serve_options() if option.field not in reach)
    return tuple(replace(o, default=256) if o.field == "batch_rows" else o for o in options)


def info_options() -> tuple[Option, ...]:
    """List options of a worker that say where a model is computed and what memory it has."""
    names = {
        *GROUPS["Memory"],
        "revision",
        "device",
        "dtype",
        "tp",
        "quantize",
        "activations",
        "kv_dtype",
        "max_context",
    }
    names |= {"max_running", "max_step_tokens"}
    return tuple(option for option in WORKER_OPTIONS if option.field in names)


def check_router(config: RouterConfig) -> None:
    """Checks a router's options. Raises OptionError for what would keep it from starting."""
    from loraplex.router.start_check import check_options  # `--help` is quick

    try:
        check_options(config)
    except RouterConfigError as error:
        raise OptionError(str(error)) from error


def check_worker(config: WorkerConfig) -> None:
    """Check options before a download. Raises OptionError for sources and a Redis that
    cannot be, AdapterError for what this installation lacks.
    """
    from loraplex.server.worker.adapters.adapter_store import sources_of

    _check_void(config)
    if config.redis:
        from loraplex.router.shared.redis_link import RedisLink

        try:
            RedisLink(config.redis, timeout_s=1.0)
        except ValueError as error:
            raise OptionError(f"--redis: {error}") from error
    try:
        sources_of(config)
    except AdapterError as error:
        if error.code != "bad_ref":
            raise
        raise OptionError(error.message) from error


def _check_void(config: WorkerConfig) -> None:
    """Refuse an option that another one makes void. Raises OptionError."""
    if config.advertise and not config.redis:
        raise OptionError("--advertise is what routers find by --redis; there is none")
    share = next(option for option in WORKER_OPTIONS if option.field == "gpu_memory_utilization")
    if config.kv_memory is not None and config.gpu_memory_utilization != share.default:
        raise OptionError(
            "--gpu-memory-utilization says what is left for the KV cache, and so does --kv-memory: "
            "drop one of them"
        )


def check_variables(environ: Mapping[str, str]) -> None:
    """Raises OptionError for LORAPLEX_ variables that are no option of any command."""
    options = (*WORKER_OPTIONS, *ROUTER_OPTIONS, *GROUP_OPTIONS, API_KEY)
    known = {option.variable for option in options}
    known |= {f"{option.variable}_FILE" for option in options if option.is_secret}
    problems = unknown_variables(environ, known)
    if problems:
        raise OptionError("; ".join(problems))


def resolve(
    options: Iterable[Option],
    arguments: Namespace,
    environ: Mapping[str, str],
    optional: Collection[str] = (),
) -> dict[str, Values]:
    """Values of all options by field: flag, else variable, else default. Raises OptionError.

    optional: fields that may be None here although their config requires a value.
    """
    options = [replace(o, default=None) if o.field in optional else o for o in options]
    return {option.field: _resolve_one(option, arguments, environ) for option in options}


def _resolve_one(option: Option, arguments: Namespace, environ: Mapping[str, str]) -> Values:
    if option.is_secret:
        return _secret(option, arguments, environ)
    given: list[str] | str | None = getattr(arguments, option.field, None)
    name = f"--{option.flag}" if option.field != "model" else "MODEL"
    if given is not None:
        texts = [given] if isinstance(given, str) else given
        if option.field == "model":
            path_of(texts[-1], name)  # it may be a folder
        return parse(option, texts, name)
    text = environ.get(option.variable)
    if text is not None:
        texts = [part.strip() for part in text.split(",") if part.strip()]
        return parse(option, texts if option.is_list else [text], option.variable)
    if option.is_required:
        raise OptionError(f"{name} (or {option.variable}) is needed: {option.help}")
    default: Values = option.default
    return default


def _secret(option: Option, arguments: Namespace, environ: Mapping[str, str]) -> str:
    """A secret from the environment or a file; any user of the machine could read a flag."""
    flag: str | None = getattr(arguments, f"{option.field}_file", None)
    if flag is not None:
        return read_secret(flag, f"--{option.flag}-file")
    variable = f"{option.variable}_FILE"
    if environ.get(variable):
        return read_secret(environ[variable], variable)
    for variable in (option.variable, option.fallback):
        text = environ.get(variable, "").strip()
        if text:
            return _one_line(text, variable)
    return ""


def secret_value(field: str, file: str | None, environ: Mapping[str, str]) -> str:
    """Reads a secret for a command that only talks to a router. field: `api_key`, or a secret
    option of the router. Raises OptionError."""
    option = next(option for option in (*ROUTER_OPTIONS, API_KEY) if option.field == field)
    return _secret(option, Namespace(**{f"{field}_file": file}), environ)


def keys_file_of(keys: Iterable[str]) -> Path:
    """A keys file in memory, of digests alone, for as long as this process lives."""
    from loraplex.router.tenancy.keyring import digest_of

    digests = enumerate(dict.fromkeys(map(digest_of, keys)), 1)
    entries = [{"id": f"api-key-{number}", "sha256": digest} for number, digest in digests]
    held = os.memfd_create("keys")
    os.write(held, msgspec.json.encode({"keys": entries}))
    return Path(f"/proc/{os.getpid()}/fd/{held}")


def read_secret(named: str, source: str) -> str:
    """Reads a secret from a file. source: the flag or variable. Raises OptionError."""
    path = path_of(named, source)
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_SECRET_BYTES + 1).decode().strip()
    except OSError as error:
        raise OptionError(f"{source} {named!r} cannot be read: {error.strerror}") from None
    except ValueError:
        raise OptionError(f"{source} {named!r} cannot be read: it is no text in UTF-8") from None
    if not text:
        raise OptionError(f"{source} {named!r}: the file is empty")
    return _one_line(text, f"{source} {named!r}")


def _one_line(secret: str, source: str) -> str:
    """Checks and returns a secret of one line. Raises OptionError, without the secret."""
    if len(secret.encode("utf-8", "surrogateescape")) > _MAX_SECRET_BYTES:
        raise OptionError(f"{source} holds more than {_MAX_SECRET_BYTES} bytes")
    if not secret.isprintable():
        raise OptionError(f"{source} must be one line of printable text")
    return secret


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """A child's environment. Its options, secrets among them, come on its stdin."""
    kept = {name: value for name, value in environ.items() if not name.startswith(PREFIX)}
    return kept | {"PYTHONUNBUFFERED": "1"}


def document_of(config: Any) -> bytes:
    """A config as the JSON document that `config_of` reads."""
    return msgspec.json.encode(config, enc_hook=os.fspath)


def config_of(kind: type[T], document: bytes) -> T:
    """A config from its document. Raises ValueError."""
    return msgspec.json.decode(document, type=kind, dec_hook=lambda to, text: to(text))
