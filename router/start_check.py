"""Checks options, and the files that they name, before anything runs."""

import contextlib
import os
import re
from collections.abc import Iterator

from loraplex.adapters.common.worker_record import is_worker_url
from loraplex.adapters.errors import AdapterError
from loraplex.adapters.ref import is_owner, local_name, name_fault, parse_ref
from loraplex.router.call import BASE_PLACEHOLDERS
from loraplex.router.config import RouterConfig, RouterConfigError
from loraplex.router.files.store import folder_id
from loraplex.router.http.tls import server_context
from loraplex.router.names.registration import Registration
from loraplex.router.operations.adapters_file import WHOLE
from loraplex.router.operations.declarations import read_file
from loraplex.router.parts.reasoning import REASONING
from loraplex.router.shared.sharing import make_sharing
from loraplex.router.telemetry.tracing import check_tracing
from loraplex.router.tenancy.keyring import read_keys_file
from loraplex.router.tenancy.keys import KeysFileError
from loraplex.router.tenancy.price_file import PricesError, read_prices
from loraplex.router.tenancy.tenancy import ExposureError, check_exposure
from loraplex.router.tools.registry import FORMATS

# As a browser writes it; it compares letter by letter.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[^\s/?#@:A-Z\[\]]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")


def check_options(config: RouterConfig) -> None:
    """Checks a router's options. Raises RouterConfigError for what would keep a router from
    starting. Connects to nothing.

    What fails at one entry of the adapters file costs that entry alone, later as at the start.
    """
    check_workers(config)
    check_bases(config)
    _check_void(config)
    declared_adapters(config)
    with blaming("--host", ExposureError):
        check_exposure(config)
    for flag, key in (("--admin-key-file", config.admin_key), ("--secret-file", config.secret)):
        if not key.isascii():
            raise RouterConfigError(f"{flag}: the key must be ASCII, as it is sent in a header")
    _check_formats(config.tool_format, config.reasoning_format)
    for owner in config.hub_owners:
        if not is_owner(owner):
            raise RouterConfigError(f"--hub-owner {owner!r}: expected one owner's name")
    for origin in config.cors_origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise RouterConfigError(
                f"--cors-origin {origin!r}: expected scheme://host or scheme://host:port, or *"
            )
    _check_tls(config)
    _check_default_adapter(config)
    if config.keys_file is not None:
        with blaming(f"--keys-file {config.keys_file}", KeysFileError):
            read_keys_file(config.keys_file)
    if config.prices is not None:
        with blaming(f"--prices {config.prices}", PricesError):
            read_prices(config.prices)
    _check_adapters_file(config)
    _check_watched(config)
    if config.files_dir is not None:
        with blaming("--files-dir", OSError):
            folder_id(config.files_dir.expanduser())
    with blaming("--redis", ValueError):
        make_sharing(config)
    with blaming("--otlp-endpoint", ValueError):
        check_tracing(config)


def _check_formats(tool_format: str, reasoning_format: str) -> None:
    """Checks names of formats. Raises RouterConfigError for names of no format."""
    for option, name, known in (
        ("--tool-format", tool_format, ("auto", *FORMATS)),
        ("--reasoning-format", reasoning_format, ("auto", "none", *REASONING)),
    ):
        if name not in known:
            raise RouterConfigError(f"{option} {name!r}: expected one of {', '.join(known)}")


@contextlib.contextmanager
def blaming(option: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raises errors of these kinds as RouterConfigError, with the name of the option."""
    try:
        yield
    except kinds as error:
        raise RouterConfigError(f"{option}: {error}") from error


def check_workers(config: RouterConfig) -> None:
    """Checks the URLs of workers. Raises RouterConfigError."""
    for url in config.workers:
        with blaming(f"--worker {url!r}", ValueError):
            if not is_worker_url(url):
                raise ValueError("expected ws://host:port or wss://host:port")


def base_names(config: RouterConfig) -> tuple[str, ...]:
    """Names of the router's bases; "" of the only one, where none is declared."""
    return config.bases or ("",)


def check_bases(config: RouterConfig) -> None:
    """Checks the names of bases. Raises RouterConfigError."""
    adapters = {text.partition("=")[0] for text in config.adapters}
    for name in config.bases:
        if name in BASE_PLACEHOLDERS or config.bases.count(name) > 1:
            raise RouterConfigError(f"--base {name!r}: expected a name, and each once")
        if name in adapters:
            raise RouterConfigError(f"--base {name!r}: --adapter gives this name to an adapter")


def declared_adapters(config: RouterConfig) -> list[Registration]:
    """Registrations that --adapter declares. Raises RouterConfigError."""
    declared = [_declared(text, config) for text in config.adapters]
    names = [registration.name for registration in declared]
    for name in names:
        if names.count(name) > 1:
            raise RouterConfigError(f"--adapter: the name {name!r} is given more than once")
    return declared


def _check_void(config: RouterConfig) -> None:
    """Refuses options of which one makes another mean nothing: it would be ignored in silence."""
    if config.auth == "none" and config.keys_file is not None:
        raise RouterConfigError("--keys-file: with --auth none nobody is asked for a key; drop one")
    if config.share_hub_token and not config.hub_token:
        raise RouterConfigError(
            "--share-hub-token lends the operator's Hub token, and there is none: set"
            " LORAPLEX_HUB_TOKEN or HF_TOKEN"
        )
    several_or_tls = config.router_processes > 1 or config.tls_cert is not None
    if config.uds is not None and several_or_tls:
        raise RouterConfigError("--uds is one router's, without --tls-cert")
    if config.responses.keep_s and not config.redis and config.files_dir is None:
        raise RouterConfigError(
            "--responses-keep-s: answers are stored in --redis or --files-dir; give one of them"
        )
    own = config.max_tenant_queue
    if own is not None and own > config.max_queue:
        raise RouterConfigError(
            f"--max-tenant-queue {own} is more than --max-queue {config.max_queue}, which all "
            "tenants share"
        )


def _check_default_adapter(config: RouterConfig) -> None:
    try:
        if config.default_adapter:
            parse_ref(config.default_adapter, config.default_source)
    except AdapterError as error:
        raise RouterConfigError(f"--default-adapter: {error.message}") from error


def _check_tls(config: RouterConfig) -> None:
    if (config.tls_cert is None) != (config.tls_key is None):
        raise RouterConfigError("--tls-cert and --tls-key: give both, or neither")
    if config.tls_cert is not None and config.tls_key is not None:
        server_context(config.tls_cert, config.tls_key)


def _check_adapters_file(config: RouterConfig) -> None:
    """Reads the adapters file. Later, what is wrong with it as a whole leaves all as it was; at the
    start there is nothing.

    A router that began without the operator's names would answer 404 where others know them.
    """
    if config.adapters_file is None:
        return
    contents = read_file(config.adapters_file, config.default_source)
    if not contents.is_readable:
        raise RouterConfigError(f"--adapters-file {config.adapters_file}: {contents.errors[WHOLE]}")


def _check_watched(config: RouterConfig) -> None:
    """Checks that watched folders are there, and that references can name them."""
    for folder in config.watch_folders:
        option, path = f"--watch-folder {folder}", os.path.abspath(folder.expanduser())
        if not os.path.isdir(path):
            raise RouterConfigError(f"{option}: there is no such folder")
        with blaming(option, AdapterError):
            parse_ref(f"local:{local_name(path)}/name")


def _declared(text: str, config: RouterConfig) -> Registration:
    name, equals, target = text.partition("=")
    if not equals or not name:
        raise RouterConfigError(f"--adapter {text!r}: expected NAME=REF")
    fault = name_fault(name)
    if fault is not None:
        raise RouterConfigError(f"--adapter {text!r}: {fault}")
    if name in BASE_PLACEHOLDERS:
        raise RouterConfigError(f"--adapter {text!r}: clients mean the base model by {name!r}")
    try:
        ref = parse_ref(target, config.default_source)
    except AdapterError as error:
        raise RouterConfigError(f"--adapter {text!r}: {error.message}") from error
    if ref.source == "alias":
        raise RouterConfigError(
            f"--adapter {text!r}: {target!r} names no source; write hub:, local:, s3:, "
            "https:// or modelscope:"
        )
    return Registration(name, ref, "option")
