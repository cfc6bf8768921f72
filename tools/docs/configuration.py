"""The page docs/reference/configuration.md, made from the options."""

from collections.abc import Iterable

from loraplex.launcher.command_line import GROUPS, REST
from loraplex.launcher.config import GROUP_OPTIONS, ROUTER_OPTIONS, WORKER_OPTIONS, serve_options
from loraplex.launcher.options import Option, show

_HEAD = """\
# Configuration

<!-- Written by `python -m tools.docs`; a test holds it fresh. -->

An option is a flag, or a variable `LORAPLEX_<OPTION>`; a flag wins. There is no configuration file.

- A list's flag may be repeated; its variable has commas between the values.
- Sizes take a unit: `512MiB` and `512M` are 2^20, `2GB` is 10^9. Times are seconds. A switch is
  `--share-hub-token` or `--no-share-hub-token`, its variable `true` or `false`.
- A secret has no flag of its own, since others can see a process's command line. It comes from its
  variable, or from the file that `--<secret>-file` or `LORAPLEX_<SECRET>_FILE` names.
- A bad value, and a variable `LORAPLEX_…` that is no option, stops the start with its name.

`loraplex <command> --help` shows the same. The Hub's own variables hold for models and adapters
(`HF_ENDPOINT`, `HF_HUB_OFFLINE`, `HF_HOME`); `HF_TOKEN` is used for the base model, by
`loraplex adapter`, and, without `LORAPLEX_HUB_TOKEN`, for what a server has registered.
"""
_SERVE = """\
## loraplex serve [MODEL]

`serve` takes the options of both the router and the worker, but for
{without}.
An option of both gets one value for both; `--host` and `--port` are the router's. Without MODEL
`serve` serves the demo. Its own options, and what it takes otherwise than a worker:
"""
_COLUMNS = "| option | variable | default | meaning |\n| --- | --- | --- | --- |\n"


def render() -> str:
    """The whole page."""
    taken = {option.field for option in serve_options()}
    missing = [o for o in (*ROUTER_OPTIONS, *WORKER_OPTIONS) if o.field not in taken]
    names = dict.fromkeys(_flag(option) for option in missing)
    parts = [
        _HEAD,
        _SERVE.format(without=", ".join(f"`{name}`" for name in names)),
        f"{_COLUMNS}{_rows(GROUP_OPTIONS)}",
        _section("loraplex router", ROUTER_OPTIONS),
        _section("loraplex worker MODEL", WORKER_OPTIONS),
    ]
    return "\n".join(parts)


def _section(title: str, options: tuple[Option, ...]) -> str:
    groups: dict[str, list[Option]] = {group: [] for group in (*GROUPS, REST)}
    for option in options:
        field = "revision" if option.field == "model" else option.field
        groups[next((g for g, fields in GROUPS.items() if field in fields), REST)].append(option)
    parts = [f"### {group}\n\n{_COLUMNS}{_rows(rows)}" for group, rows in groups.items() if rows]
    return "\n".join([f"## {title}\n", *parts])


def _rows(options: Iterable[Option]) -> str:
    cells = (
        (f"`{_flag(o)}`", f"`{o.variable}`", _default(o), _meaning(o).replace("|", "\\|"))
        for o in options
    )
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def _flag(option: Option) -> str:
    if option.field == "model":
        return "MODEL"
    return f"--{option.flag}-file" if option.is_secret else f"--{option.flag}"


def _default(option: Option) -> str:
    if option.is_required:
        return "needed"
    if option.kind == "bool":
        return "yes" if option.default else "no"
    if option.default in ("", ()) or (option.default is None and option.unset == "none"):
        return ""
    value = f"{option.default:g}" if option.kind == "float" else show(option, option.default)
    return f"`{value}`"


def _meaning(option: Option) -> str:
    choices = f"; one of {', '.join(option.choices)}" if option.choices else ""
    return f"{option.help}{' (a list)' if option.is_list else ''}{choices}"
