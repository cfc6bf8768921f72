"""`loraplex adapter list|register|load|rollout|…`: the lifecycle API of a running router."""

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from loraplex.launcher.options import OptionError
from loraplex.launcher.router_client import (
    Failed,
    add_router_options,
    as_json,
    connect,
    push,
    send,
    table,
)
from loraplex.router.names.served import OwnedName

ACTIONS = {
    "load": "bring adapters to every worker's device, and into service",
    "pin": "the same; and there they stay",
    "unpin": "let them be evicted again",
    "unload": "take them out of service; frees memory when running requests are over",
    "refresh": "resolve their references again",
    "delete": "forget the names; requests that use them get 410",
}


def _finite(text: str) -> float:
    """Reads a finite number, as JSON has no other."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"expected a number, got {text[:40]!r}")
    return number


# As in the API's `guards`.
GUARDS: dict[str, Callable[[str], float]] = {
    "window_s": int,
    "min_requests": int,
    "max_error_increase": _finite,
    "max_latency_ratio": _finite,
    "max_score_drop": _finite,
    "score_error": _finite,
}
_COLUMNS = (
    *("NAME", "TENANT", "STATE", "PINNED", "DIGEST"),
    *("RANKS", "BYTES", "ON DEVICE", "REFERENCE"),
)


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
    register.add_argument(
        "--tool-format", metavar="NAME", help="in which it writes calls of tools; auto = none said"
    )
    push = actions.add_parser("push", help="upload an adapter to a running router, as a name")
    push.add_argument("name", metavar="NAME")
    push.add_argument("folder", metavar="FOLDER", type=Path, help="as PEFT saves an adapter")
    push.add_argument("--keep", metavar="N", type=int, help="versions that stay [as before, or 1]")
    push.add_argument("--replace", action="store_true", help="even if the name is no upload's")
    parsers = {"list": listing, "register": register, "push": push, **_rollout_parsers(actions)}
    for name, text in ACTIONS.items():
        parser = actions.add_parser(name, help=text)
        parser.add_argument("names", metavar="NAME", nargs="+")
        parsers[name] = parser
    for parser in parsers.values():
        parser.add_argument("--tenant", help="whose names they are [the fleet's]")
        add_router_options(parser)
    return parsers


def _rollout_parsers(
    actions: "argparse._SubParsersAction[Any]",
) -> dict[str, argparse.ArgumentParser]:
    rollout = actions.add_parser("rollout", help="versions of a name side by side: show or set")
    rollout.add_argument("name", metavar="NAME")
    rollout.add_argument(
        "versions", metavar="REF=WEIGHT", nargs="*", type=_version, help="of 100; the rest stays"
    )
    rollout.add_argument("--end", action="store_true", help="all to the old version")
    rollout.add_argument("--no-guards", action="store_true", help="take nothing back by itself")
    for option, kind in GUARDS.items():
        name = "N" if kind is int else "X"
        flag = f"--{option.replace('_', '-')}"
        rollout.add_argument(flag, metavar=name, type=kind, help="of the guards")
    promote = actions.add_parser("promote", help="the name means its new version from now on")
    back = actions.add_parser("rollback", help="take versions back, or a name to what it meant")
    history = actions.add_parser("history", help="what a name meant, newest first")
    for parser in (promote, back, history):
        parser.add_argument("name", metavar="NAME")
    for parser in (promote, back):
        parser.add_argument("--digest", help="of the version that is meant, or how it begins")
    return {"rollout": rollout, "promote": promote, "rollback": back, "history": history}


def _version(text: str) -> dict[str, Any]:
    reference, _, weight = text.rpartition("=")
    if not reference or not weight.isascii() or not weight.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: expected REF=WEIGHT, such as org/name@v2=5")
    return {"reference": reference, "weight": int(weight)}


def run(arguments: argparse.Namespace, admin_key: str, token: str | None = None) -> int:
    """Runs a command about adapters. Returns the exit code: 1 if anything failed; the rest was
    done. Raises OptionError."""
    if arguments.action == "rollout":
        _check_rollout(arguments)
    code = 0
    answers: list[Any] = []
    with connect(arguments.url, admin_key) as http:
        for request in _requests(arguments, token):
            try:
                if arguments.action == "push":
                    answers.append(push(http, request[1], arguments.folder))
                else:
                    answers.append(send(http, *request))
            except Failed as error:
                sys.stderr.write(f"loraplex: {error}\n")
                code = 1
    sys.stdout.write(as_json(answers) if arguments.json else _text(arguments, answers))
    return code


def _requests(
    arguments: argparse.Namespace, token: str | None
) -> Iterator[tuple[str, str, dict[str, Any] | None]]:
    action = arguments.action
    if action == "list" and not arguments.names:
        yield "GET", f"/v1/adapters{_query(arguments)}", None
    elif action == "register":
        body = {"name": arguments.name, "ref": arguments.ref, "tenant": arguments.tenant}
        flags = {"replace": arguments.replace}
        if arguments.pin:  # without, a name that is pinned stays so
            flags["pin"] = True
        if arguments.tool_format is not None:
            body["tool_format"] = arguments.tool_format
        yield "POST", "/v1/adapters", {**body, **flags, "token": token}
    elif action == "push":
        yield "PUT", _push_path(arguments), None
    elif action in ("rollout", "promote", "rollback", "history"):
        yield _rollout_request(arguments)
    else:
        for name in arguments.names:
            method = {"list": "GET", "delete": "DELETE"}.get(action)
            path = _path(arguments, name, "" if method else f"/{action}")
            yield method or "POST", path, None


def _check_rollout(arguments: argparse.Namespace) -> None:
    """Refuse options that would be left out in silence. Raises OptionError."""
    flags = [name for name in GUARDS if getattr(arguments, name) is not None]
    said = [f"--{name.replace('_', '-')}" for name in flags]
    if arguments.no_guards and said:
        raise OptionError(f"--no-guards and {said[0]} contradict each other")
    said += ["--no-guards"] if arguments.no_guards else []
    if arguments.end and (arguments.versions or said):
        raise OptionError("--end ends the rollout: no versions and no guards beside it")
    if said and not arguments.versions:
        raise OptionError(f"{said[0]} needs the versions that it is for, as REF=WEIGHT")


def _path(arguments: argparse.Namespace, name: str, rest: str) -> str:
    return f"/v1/adapters/{quote(name, safe='')}{rest}{_query(arguments)}"


def _push_path(arguments: argparse.Namespace) -> str:
    said = {"tenant": arguments.tenant, "keep": arguments.keep}
    said |= {"replace": "true"} if arguments.replace else {}
    query = urlencode({name: value for name, value in said.items() if value is not None})
    return f"/v1/adapters/{quote(arguments.name, safe='')}{'?' if query else ''}{query}"


def _query(arguments: argparse.Namespace) -> str:
    tenant = arguments.tenant
    return "" if tenant is None else f"?{urlencode({'tenant': tenant})}"


def _rollout_request(arguments: argparse.Namespace) -> tuple[str, str, dict[str, Any] | None]:
    action = arguments.action
    path = _path(arguments, arguments.name, f"/{action}")
    if action == "history":
        return "GET", path, None
    if action != "rollout":
        return "POST", path, {} if arguments.digest is None else {"digest": arguments.digest}
    if arguments.end:
        return "DELETE", path, None
    if not arguments.versions:
        return "GET", path, None
    body: dict[str, Any] = {"versions": arguments.versions}
    guards = {name: getattr(arguments, name) for name in GUARDS}
    given = {name: value for name, value in guards.items() if value is not None}
    if arguments.no_guards or given:
        body["guards"] = None if arguments.no_guards else given
    return "POST", path, body


def _text(arguments: argparse.Namespace, answers: list[Any]) -> str:
    if arguments.action == "delete":
        return "".join(f"{_named(one)} deleted\n" for one in answers)
    if arguments.action == "refresh":
        return "".join(_refreshed(one) for one in answers)
    if arguments.action == "push":
        return "".join(_pushed(one) for one in answers)
    if arguments.action == "history":
        return "".join(f"{line}\n" for one in answers for line in _history(one["data"]))
    if arguments.action == "rollout" and answers and answers[0].get("object") != "adapter":
        return "".join(f"{line}\n" for one in answers for line in _versions(one))
    adapters: list[dict[str, Any]] = []
    for one in answers:
        adapters += one["data"] if one["object"] == "list" else [one]
    notes = [f"{_named(a)}: {a['error']}" for a in adapters if a["error"]]
    notes += [f"{_named(a)}: {a['partial']['message']}" for a in adapters if a.get("partial")]
    notes += [problem for one in answers for problem in one.get("file_errors", [])]
    for one in adapters:
        if one.get("rollout"):
            notes += [f"{_named(one)}: {line}" for line in _versions(one["rollout"])]
    lines = [*table([_COLUMNS, *map(_row, adapters)]), *notes]
    return "".join(f"{line}\n" for line in lines) if adapters or notes else ""


def _versions(rollout: dict[str, Any]) -> list[str]:
    measured = {one["digest"]: one for one in rollout["measured"] or ()}
    header = ("VERSION", "WEIGHT", "LIVE", "STATE", "REQUESTS", "FAILED", "FIRST TOKEN P95", "WHY")
    rows = [header]
    for version in rollout["versions"]:
        seen = measured.get(version["digest"], {})
        first_s = seen.get("first_token_p95_s")
        rows.append(
            (
                f"{_short(version['digest'])} {version['reference']}",
                *(str(version["weight"]), str(version["live_weight"]), version["state"]),
                *(str(seen.get("requests", "-")), str(seen.get("failed", "-"))),
                "-" if first_s is None else f"{first_s:.3g} s",
                version["why"] or "-",
            )
        )
    alone = rollout.get("measured_by") == "this_router"
    return [*table(rows), *(["measured by this router alone: there is no Redis"] if alone else ())]


def _history(changes: list[dict[str, Any]]) -> list[str]:
    rows = [("WHEN", "ACTION", "BY", "DIGEST", "BEFORE", "REFERENCE", "NOTE")]
    for change in changes:
        when = datetime.fromtimestamp(change["since"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        texts = (change["action"], change["by"] or "-", _short(change["digest"]))
        rest = (_short(change["before"]), change["ref"] or "-", change["note"] or "-")
        rows.append((when, *texts, *rest))
    return table(rows)


def _refreshed(one: dict[str, Any]) -> str:
    name, old, new = _named(one["adapter"]), one["old_digest"], one["new_digest"]
    if not one["changed"]:
        return f"{name} unchanged: {_short(new)}\n"
    return f"{name} changed: {_short(old)} -> {_short(new)}\n"


def _pushed(one: dict[str, Any]) -> str:
    adapter = one["adapter"]
    there = f"on {', '.join(adapter['resident_on']) or 'no worker'}"
    missing = "".join(
        f"\n{worker} does not have it: {why}" for worker, why in one["missing"].items()
    )
    return f"{_named(adapter)}@{one['version']} {_short(adapter['digest'])} {there}{missing}\n"


def _row(adapter: dict[str, Any]) -> tuple[str, ...]:
    return (
        adapter["id"],
        adapter.get("tenant") or "-",
        adapter["state"],
        "yes" if adapter["pinned"] else "no",
        _short(adapter["digest"]),
        ",".join(map(str, adapter["ranks"] or ())) or "-",
        "-" if adapter["nbytes"] is None else f"{adapter['nbytes']:,}",
        ",".join(adapter["resident_on"]) or "-",
        adapter["ref"],
    )


def _named(adapter: dict[str, Any]) -> str:
    return str(OwnedName(adapter["id"], adapter.get("tenant") or ""))


def _short(digest: str | None) -> str:
    return "-" if digest is None else digest[:12]
