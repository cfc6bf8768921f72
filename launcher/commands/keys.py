"""`loraplex key create|list|rotate|…`: keys of the callers of a running router."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any
from urllib.parse import quote

import msgspec

from loraplex.launcher.options import OptionError
from loraplex.launcher.router_client import (
    Failed,
    add_router_options,
    as_json,
    connect,
    send,
    table,
)

ACTIONS = {
    "block": "let keys open nothing for now",
    "unblock": "let them open again what they opened",
    "delete": "delete keys",
}
_LIMITS = {
    "requests_per_minute": "requests a minute",
    "tokens_per_minute": "tokens a minute, prompts and answers together",
    "concurrency": "requests at a time",
    "budget_tokens": "tokens a period",
    "budget_period_s": "seconds of a period [86400]",
}
_COLUMNS = ("ID", "TENANT", "STATE", "OPENS", "LIMITS", "EXPIRES", "ORIGIN", "LABEL")


def add_commands(actions: "argparse._SubParsersAction[Any]") -> dict[str, argparse.ArgumentParser]:
    """Parsers of all commands, by name."""
    create = actions.add_parser("create", help="make a key; it is shown this once")
    create.add_argument("--id", metavar="ID", help="its name from now on [made up]")
    create.add_argument("--tenant", metavar="NAME", help="whose it is [default]")
    create.add_argument("--label", metavar="TEXT", help="what it is for")
    create.add_argument(
        "--model", metavar="PATTERN", action="append", help="what it opens; may be repeated [*]"
    )
    create.add_argument(
        "--priority", choices=("high", "normal", "low"), help="of its requests [its tenant's]"
    )
    create.add_argument("--upload", action="store_true", help="it may upload adapters, too")
    create.add_argument("--expires", metavar="TIME", help="such as 2030-01-01T00:00:00Z")
    for name, text in _LIMITS.items():
        flag = f"--{name.replace('_', '-')}"
        create.add_argument(flag, dest=name, metavar="N", type=int, help=text)
    rotate = actions.add_parser("rotate", help="another key in its place; it is shown this once")
    rotate.add_argument("id", metavar="ID")
    rotate.add_argument(
        "--grace", metavar="SECONDS", type=int, default=0, help="how long the old one is good still"
    )
    listing = actions.add_parser("list", help="all keys")
    parsers = {"create": create, "rotate": rotate, "list": listing}
    for name, text in ACTIONS.items():
        parser = actions.add_parser(name, help=text)
        parser.add_argument("ids", metavar="ID", nargs="+")
        parsers[name] = parser
    for parser in parsers.values():
        add_router_options(parser)
    generate = actions.add_parser("generate", help="a key, and its line in a file of keys")
    generate.add_argument("id", metavar="ID")
    return parsers | {"generate": generate}


def run(arguments: argparse.Namespace, admin_key: str) -> int:
    """Runs a command about keys. Returns the exit code: 1 if anything failed; the rest was done.
    Raises OptionError."""
    if arguments.action == "generate":
        return _generate(arguments.id)
    code = 0
    answers: list[Any] = []
    requests = list(_requests(arguments))
    with connect(arguments.url, admin_key) as http:
        for request in requests:
            try:
                answers.append(send(http, *request))
            except Failed as error:
                sys.stderr.write(f"loraplex: {error}\n")
                code = 1
    for hint in (hint for answer in answers for hint in answer.get("hints", ())):
        sys.stderr.write(f"loraplex: {hint}\n")
    sys.stdout.write(as_json(answers) if arguments.json else _text(arguments.action, answers))
    return code


def _generate(key_id: str) -> int:
    from loraplex.router.tenancy.keyring import digest_of, new_secret
    from loraplex.router.tenancy.keys import Word

    try:
        msgspec.convert(key_id, Word)
    except msgspec.ValidationError:
        expected = "a word of A-Za-z0-9._- that begins with a letter or digit, up to 64"
        raise OptionError(f"ID must be {expected}, got {key_id[:80]!r}") from None
    key = new_secret()
    sys.stdout.write(f"{key}\n\nkeys:\n  - id: {key_id}\n    sha256: {digest_of(key)}\n")
    return 0


def _requests(
    arguments: argparse.Namespace,
) -> Iterator[tuple[str, str, dict[str, Any] | None]]:
    action = arguments.action
    if action == "list":
        yield "GET", "/v1/keys", None
    elif action == "create":
        yield "POST", "/v1/keys", _wanted(arguments)
    elif action == "rotate":
        yield "POST", f"{_path(arguments.id)}/rotate", {"grace_s": arguments.grace}
    else:
        for key_id in arguments.ids:
            if action == "delete":
                yield "DELETE", _path(key_id), None
            else:
                yield "POST", f"{_path(key_id)}/{action}", None


def _wanted(arguments: argparse.Namespace) -> dict[str, Any]:
    fields = {"id": arguments.id, "tenant": arguments.tenant, "label": arguments.label}
    fields |= {"models": arguments.model, "expires_at": _moment(arguments.expires)}
    fields["priority"] = arguments.priority
    fields["rights"] = ["upload"] if arguments.upload else None
    limits = {name: getattr(arguments, name) for name in _LIMITS}
    fields["limits"] = {name: limit for name, limit in limits.items() if limit is not None}
    return {name: value for name, value in fields.items() if value is not None}


def _moment(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise OptionError(f"--expires must be a time with its zone, got {text!r}")
    return int(moment.timestamp())


def _path(key_id: str) -> str:
    return f"/v1/keys/{quote(key_id, safe='')}"


def _text(action: str, answers: list[Any]) -> str:
    if action in ("create", "rotate"):
        return "".join(f"{one['key']}\n" for one in answers)
    if action == "delete":
        return "".join(f"{one['id']} deleted\n" for one in answers)
    keys = [key for one in answers for key in (one["data"] if one["object"] == "list" else [one])]
    lines = table([_COLUMNS, *map(_row, keys)]) if keys else []
    return "".join(f"{line}\n" for line in lines)


def _row(key: dict[str, Any]) -> tuple[str, ...]:
    expires_at = key["expires_at"]
    is_over = expires_at is not None and expires_at <= time.time()
    limits = {name: limit for name, limit in key["limits"].items() if limit is not None}
    if "budget_tokens" not in limits:
        limits.pop("budget_period_s", None)
    return (
        key["id"],
        key["tenant"],
        "blocked" if key["blocked"] else "expired" if is_over else "good",
        ",".join(key["models"]) or "-",
        json.dumps(limits)[1:-1].replace('"', "") or "-",
        "never" if expires_at is None else time.strftime("%FT%TZ", time.gmtime(expires_at)),
        key["origin"],
        key["label"],
    )
