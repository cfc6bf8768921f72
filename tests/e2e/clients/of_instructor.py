"""instructor: its modes for OpenAI, whole and partial."""

import instructor
import openai

from tests.e2e.clients.asking import (
    JSON,
    KEY,
    MAX_TOKENS,
    MESSAGE,
    TOOLS,
    AnyObject,
    Request,
    check,
    run,
)

MESSAGES = [{"role": "user", "content": MESSAGE}]


def client(url: str, mode: instructor.Mode) -> instructor.Instructor:
    plain = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    return instructor.from_openai(plain, mode=mode)


def schemas(url: str) -> None:
    modes = ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS")
    for mode in (instructor.Mode[name] for name in modes):
        limit = "max_output_tokens" if "RESPONSES" in mode.name else "max_tokens"
        answer = client(url, mode).create(
            model=TOOLS if "TOOLS" in mode.name else JSON,
            messages=MESSAGES,
            response_model=Request,
            temperature=0,
            max_retries=0,
            **{limit: MAX_TOKENS},
        )
        check(isinstance(answer, Request), f"{mode}: {answer}")


def json_mode(url: str) -> None:
    """The schema is in the prompt alone, so any object is an answer."""
    answer = client(url, instructor.Mode.JSON).create(
        model=JSON,
        messages=MESSAGES,
        response_model=AnyObject,
        temperature=0,
        max_tokens=MAX_TOKENS,
        max_retries=0,
    )
    check(isinstance(answer, AnyObject), f"JSON: {answer}")


def partial(url: str) -> None:
    parts = [
        *client(url, instructor.Mode.TOOLS).create_partial(
            model=TOOLS,
            messages=MESSAGES,
            response_model=Request,
            temperature=0,
            max_tokens=MAX_TOKENS,
            max_retries=0,
        )
    ]
    check(len(parts) > 2, "an object grows in a stream")
    Request.model_validate(parts[-1].model_dump())


if __name__ == "__main__":
    run(schemas, json_mode, partial)
