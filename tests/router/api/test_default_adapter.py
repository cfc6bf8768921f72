"""Which requests `--default-adapter` is for: those that name neither an adapter nor the base."""

import json
from typing import Any

import pytest

from loraplex.router.api.lorax import request as lorax
from loraplex.router.api.messages import request as messages
from loraplex.router.api.openai import chat, completions
from loraplex.router.api.request.formatter import ApiLimits, limits_from
from loraplex.router.call import AdapterChoice
from loraplex.router.config import RouterConfig, RouterConfigError
from loraplex.router.start_check import check_options

HELLO = [{"role": "user", "content": "hi"}]
# Each API's parser, its body, and how it names an adapter.
APIS: dict[str, tuple[Any, Any]] = {
    "generate": (lorax.parse, lambda name: {"inputs": "x", "parameters": {"adapter_id": name}}),
    "completions": (completions.parse, lambda name: {"prompt": "x", "model": name}),
    "chat": (chat.parse, lambda name: {"messages": HELLO, "model": name}),
    "messages": (
        messages.parse,
        lambda name: {"messages": HELLO, "model": name, "max_tokens": 5},
    ),
}


def asked(api: str, name: str, limits: ApiLimits) -> str | None:
    parse, body = APIS[api]
    found = parse(json.dumps(body(name)).encode(), limits).call.adapter
    assert found is None or isinstance(found, AdapterChoice)
    return None if found is None else found.adapter_id


def limits(default: str) -> ApiLimits:
    return limits_from(RouterConfig(default_adapter=default), ("small", "org/small"), {}, ())


@pytest.mark.parametrize("api", APIS)
def test_who_names_nothing_gets_it(api: str) -> None:
    with_default, without = limits("org/a@main"), limits("")
    for name, of_default in (("", "org/a@main"), ("small", None), ("org/small", None), ("b", "b")):
        assert asked(api, name, with_default) == of_default
        assert asked(api, name, without) == (of_default if name else None)


def test_a_reference_that_cannot_be() -> None:
    check_options(RouterConfig(default_adapter="support"))
    with pytest.raises(RouterConfigError, match="--default-adapter"):
        check_options(RouterConfig(default_adapter="hub:"))
