"""argparse from options: grouped, with their variables and defaults in the help."""

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

from loraplex.adapters.common.nearest import did_you_mean, nearest
from loraplex.launcher.options import Option, retired, show

# Fields by the heading under which the help shows them; the rest comes under "Limits".
GROUPS: Mapping[str, frozenset[str]] = {
    "Model": frozenset(
        {
            "revision",
            "device",
            "dtype",
            "quantize",
            "activations",
            "kv_dtype",
            "model_names",
            "max_context",
            "executor",
        }
    ),
    "Address": frozenset(
        {
            "host",
            "port",
            "uds",
            "secret",
            "workers",
            "worker_id",
            "admin_key",
            "advertise",
        }
    ),
    "Adapters": frozenset(
        {
            "adapters",
            "adapters_file",
            "watch_folders",
            "adapter_roots",
            "hub_owners",
            "s3_buckets",
            "https_hosts",
            "modelscope_owners",
            "modelscope_endpoint",
            "default_source",
            "share_hub_token",
            "allow_other_base",
            "text_part_only",
            "cache_dir",
            "upload_store",
            "upload_disk",
            "max_lora_rank",
            "adapter_ttl_s",
            "dora_graphs",
        }
    ),
    "Callers": frozenset({"auth", "keys_file", "prices", "share_prefixes"}),
    "Sharing": frozenset(
        {"redis", "redis_password", "redis_prefix", "redis_timeout_s", "quota_outage"}
    ),
    "Telemetry": frozenset(
        {
            "metrics_adapters",
            "metrics_compat",
            "otlp_endpoint",
            "log_requests",
            "log_format",
        }
    ),
    "GPUs": frozenset({"worker_count", "tp"}),
    "Memory": frozenset(
        {
            "mode",
            "adapter_memory",
            "host_adapter_memory",
            "kv_memory",
            "gpu_memory_utilization",
            "adapter_slots",
        }
    ),
}
REST = "Limits"


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=100)


class Parser(argparse.ArgumentParser):
    """Parses a command line. No abbreviations: an option added later must not change what a script
    means. What is unknown is said with the command's own usage, and with the nearest word that
    is known.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs.setdefault("formatter_class", _HelpFormatter)
        kwargs["allow_abbrev"] = False
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            option = next((word for word in rest if word.startswith("-")), "").partition("=")[0]
            gone = retired(option.removeprefix("--").removeprefix("no-"))
            if gone:
                self.error(gone)
            close = nearest(option, self._option_string_actions) if option else None
            # What follows an unknown option may be a secret.
            self.error(f"unrecognized arguments: {option or ' '.join(rest)}{did_you_mean(close)}")
        return found, rest

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += did_you_mean(nearest(str(value), map(str, action.choices or ())))
            raise


def add_options(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    """Adds one flag per option; values stay text until `config.resolve`."""
    groups = {title: parser.add_argument_group(title) for title in (*GROUPS, REST)}
    for option in options:
        title = next((t for t, fields in GROUPS.items() if option.field in fields), REST)
        if option.field != "model":
            _add_option(groups[title], option)


def flags_of(options: Iterable[Option]) -> dict[str, bool]:
    """Maps each flag to whether a value follows."""
    parser = Parser()
    add_options(parser, options)
    return {flag: action.nargs != 0 for flag, action in parser._option_string_actions.items()}


def _add_option(group: "argparse._ArgumentGroup", option: Option) -> None:
    text = _help(option)
    if option.is_secret:
        group.add_argument(
            f"--{option.flag}-file",
            dest=f"{option.field}_file",
            metavar="PATH",
            help=f"file with the {text}".replace("%", "%%"),
        )
        return
    if option.kind == "bool":
        _add_switch(group, option, text)
        return
    group.add_argument(
        f"--{option.flag}",
        dest=option.field,
        metavar=_metavar(option),
        action="append" if option.is_list else "store",
        help=text.replace("%", "%%"),
    )


def _add_switch(group: "argparse._ArgumentGroup", option: Option, text: str) -> None:
    group.add_argument(
        f"--{option.flag}", dest=option.field, action="store_const", const="true", help=text
    )
    group.add_argument(
        f"--no-{option.flag}",
        dest=option.field,
        action="store_const",
        const="false",
        help=argparse.SUPPRESS,
    )


def _help(option: Option) -> str:
    notes = []
    if option.is_list:
        notes.append("may be repeated")
    elif option.unset == "auto" or not (option.is_required or option.default in ("", None, False)):
        notes.append(f"default: {show(option, option.default)}")
    notes.append(option.variable)
    return f"{option.help} [{'; '.join(notes)}]"


def _metavar(option: Option) -> str:
    if option.choices:
        return "{" + ",".join(option.choices) + "}"
    named = {
        "adapters": "NAME=REF",
        "workers": "URL",
        "revision": "REV",
        "host": "ADDRESS",
        "redis": "URL",
    }
    seconds = "SECONDS" if option.field.endswith("_s") else "SHARE"
    kinds = {"int": "N", "float": seconds, "bytes": "SIZE", "path": "PATH", "text": "NAME"}
    return named.get(option.field) or kinds[option.kind]
