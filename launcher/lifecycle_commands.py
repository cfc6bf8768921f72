"""`loraplex adapter list|register|load|pin|…`: the lifecycle API of a running router."""

import argparse
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from launcher.router_client import Failed, add_router_options, as_json, connect, send, table

ACTIONS = {
    "load": "bring adapters to every worker's device, and into service",
    "pin": "the same; and there they stay",
    "unpin": "let them be evicted again",
    "unload": "take them out of service; frees memory when running requests are over",
    "refresh": "resolve their references again",
    "delete": "forget the names; requests that use them get 410",
}
_COLUMNS = ("NAME", "STATE", "PINNED", "DIGEST", "RANKS", "BYTES", "ON DEVICE", "REFERENCE")


def add_commands(actions: "argparse._SubParsersAction[Any]") -> dict[str, argparse.ArgumentParser]:
    """Parsers of all commands, by name."""
    listing = actions.add_parser("list", help="registered adapters of a running router")
    listing.add_argument("names", metavar="NAME", nargs="*", help="only these")
    register = actions.add_parser("register", help="give an adapter a name on a running router")
    register.add_argument("name", metavar="NAME")
    register.add_argument("ref", metavar="REF", help="hub:org/name[@rev] or local:path")
    register.add_argument("--pin", action="store_true", help="keep it on every device")
    register.add_argument("--replace", action="store_true", help="even if the name is taken")
    register.add_argument("--token-file", metavar="PATH", help="file with the source's credential")
    parsers = {"list": listing, "register": register}
    for name, text in ACTIONS.items():
        parser = actions.add_parser(name, help=text)
        parser.add_argument("names", metavar="NAME", nargs="+")
        parsers[name] = parser
    for parser in parsers.values():
        add_router_options(parser)
    return parsers


def run(arguments: argparse.Namespace, admin_key: str, token: str | None = None) -> int:
    """The exit code: 1 if anything failed; the rest was done."""
    code = 0
    told: list[Any] = []
    with connect(arguments.url, admin_key) as http:
        for request in _requests(arguments, token):
            try:
                told.append(send(http, *request))
            except Failed as error:
                sys.stderr.write(f"loraplex: {error}\n")
                code = 1
    sys.stdout.write(as_json(told) if arguments.json else _text(arguments, told))
    return code


def _requests(
    arguments: argparse.Namespace, token: str | None
) -> Iterator[tuple[str, str, dict[str, Any] | None]]:
    action = arguments.action
    if action == "list" and not arguments.names:
        yield "GET", "/v1/adapters", None
    elif action == "register":
        body = {"name": arguments.name, "ref": arguments.ref}
        flags = {"pin": arguments.pin, "replace": arguments.replace}
        yield "POST", "/v1/adapters", {**body, **flags, "token": token}
    else:
        for name in arguments.names:
            path = f"/v1/adapters/{quote(name, safe='')}"
            if action in ("list", "delete"):
                yield ("GET" if action == "list" else "DELETE"), path, None
            else:
                yield "POST", f"{path}/{action}", None


def _text(arguments: argparse.Namespace, told: list[Any]) -> str:
    if arguments.action == "delete":
        return "".join(f"{one['id']} deleted\n" for one in told)
    if arguments.action == "refresh":
        return "".join(_refreshed(one) for one in told)
    adapters: list[dict[str, Any]] = []
    for one in told:
        adapters += one["data"] if one["object"] == "list" else [one]
    notes = [f"{a['id']}: {a['error']}" for a in adapters if a["error"]]
    notes += [problem for one in told for problem in one.get("file_errors", [])]
    lines = [*table([_COLUMNS, *map(_row, adapters)]), *notes]
    return "".join(f"{line}\n" for line in lines) if adapters or notes else ""


def _refreshed(one: dict[str, Any]) -> str:
    name, old, new = one["adapter"]["id"], one["old_digest"], one["new_digest"]
    if not one["changed"]:
        return f"{name} unchanged: {_short(new)}\n"
    return f"{name} changed: {_short(old)} -> {_short(new)}\n"


def _row(adapter: dict[str, Any]) -> tuple[str, ...]:
    return (
        adapter["id"],
        adapter["state"],
        "yes" if adapter["pinned"] else "no",
        _short(adapter["digest"]),
        ",".join(map(str, adapter["ranks"] or ())) or "-",
        "-" if adapter["nbytes"] is None else f"{adapter['nbytes']:,}",
        ",".join(adapter["resident_on"]) or "-",
        adapter["ref"],
    )


def _short(digest: str | None) -> str:
    return "-" if digest is None else digest[:12]
