"""What the scripts of clients share: an address, models, a schema, and how a script ends."""

import sys
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

# Adapters: one answers in JSON, one calls tools. The script's arguments may name others.
JSON, TOOLS = sys.argv[2:4] or ("json", "tools")
KEY = "unused"
MESSAGE = "Please cancel order #10442 for two linen aprons, it's urgent. Thanks, Ines Novak"
# Most that an answer needs: its schema bounds every string and number.
MAX_TOKENS = 200


class Request(BaseModel):
    """What a customer wants."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12)
    intent: Literal["order", "cancel", "complaint"]
    quantity: int = Field(ge=0, le=99)
    urgent: bool


class AnyObject(BaseModel):
    """Of answers whose form the prompt alone asks for."""

    model_config = ConfigDict(extra="allow")


SCHEMA: dict[str, Any] = Request.model_json_schema()
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather of a city", "parameters": WEATHER},
}


def check(condition: bool, what: str) -> None:
    if not condition:
        raise SystemExit(f"failed: {what}")


def check_weather(arguments: dict[str, Any], what: str) -> None:
    """arguments: of a call of `weather`."""
    check(set(arguments) == {"city", "unit"}, f"{what}: {arguments}")
    check(len(arguments["city"]) <= 12, f"{what}: {arguments}")
    check(arguments["unit"] in ("celsius", "fahrenheit"), f"{what}: {arguments}")


def run(*steps: Callable[[str], None]) -> None:
    """steps: each takes the server's address; one that fails ends the script with its name."""
    url = sys.argv[1]
    failed = []
    for step in steps:
        try:
            step(url)
        except (Exception, SystemExit) as error:
            failed.append(f"{step.__name__}: {type(error).__name__}: {error}")
    if failed:
        raise SystemExit("\n".join(failed))
    print("all checks passed")
