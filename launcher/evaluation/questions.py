"""Requests of an evaluation, and what their answers say: lines of a batch's files."""

import codecs
import json
from collections.abc import Iterable, Iterator, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Any

import msgspec

from loraplex.adapters.errors import CommandError
from loraplex.launcher.evaluation.scores import MOST_POINTS, EvalLine, fault_of, is_image
from loraplex.launcher.refusals import error_text
from loraplex.results import logprobs_of
from loraplex.router.lines.records import BatchRecord

_JUDGE = """\
You judge an assistant's answer.

Question:
{question}

{reference}Answer to judge:
{answer}

How good is the answer? Reply with one whole number from 0 (wrong or of no use) to 10 (right and \
complete), and with nothing else."""

# Fields that ask for the log-probabilities of a prompt's tokens: of texts and of chats.
_OF_PROMPT = {"max_tokens": 1, "prompt_logprobs": 0}
_GOING_ON = {"add_generation_prompt": False, "continue_final_message": True}
_MEASURED = (_OF_PROMPT, _OF_PROMPT | _GOING_ON)
# By their ids special tokens are listed, too.
_LOGPROBS = {
    "prompt_logprobs": 0,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}
_read_record = msgspec.json.Decoder(BatchRecord).decode


class Request(msgspec.Struct, frozen=True):
    """A line of a batch."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


class LineAnswer(msgspec.Struct, frozen=True):
    """The part of a line's answer that is kept.

    ids, logprobs: of the prompt's tokens after the first, in nats; empty unless asked for, as are
    prompt_ids, of the whole prompt, output_ids and output_logprobs.
    created: seconds since 1970. fault: why there is no text. cost, device_s: None where the server
    has no prices.
    """

    text: str = ""
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    created: int | None = None
    fault: str | None = None
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    output_logprobs: tuple[float, ...] = ()
    cost: float | None = None
    device_s: float | None = None


def read_cases(path: Path, score: str) -> list[EvalLine]:
    """Reads a file of lines; blank ones are left out. score: its kind, as of `questions`. Raises
    CommandError."""
    try:
        texts = path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from None
    cases = []
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            case = msgspec.json.decode(text, type=EvalLine)
            fault = fault_of(case, score)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            fault = str(error)
        if fault:
            raise CommandError(f"{path}, line {number}: {fault}")
        cases.append(case)
    if not cases:
        raise CommandError(f"{path} has no lines")
    return cases


def question_id(name: str, number: int, choice: int = 0) -> str:
    """The `custom_id` of a question. number: of the line, from 1. choice: from 0."""
    return f"{name} {number} {choice}"


def questions(
    kind: str, names: Iterable[str], cases: Sequence[EvalLine], tokens: int
) -> Iterator[Request]:
    """Requests for texts, or of each choice as the prompt's end, adapter by adapter.

    kind: of scores, without a judge's name, or `logprobs` for texts with all log-probabilities.
    tokens: the most of a text.
    """
    for name in names:
        for number, case in enumerate(cases, 1):
            if kind != "choice":
                logprobs = {"logprobs": True if case.messages else 0} | _LOGPROBS
                fields = {"max_tokens": tokens} | (logprobs if kind == "logprobs" else {})
                yield _request(question_id(name, number), name, case, fields)
                continue
            for at, text in enumerate(case.choices):
                said = case.messages and [*case.messages, {"role": "assistant", "content": text}]
                prompt = None if case.prompt is None else case.prompt + text
                whole = msgspec.structs.replace(case, prompt=prompt, messages=said)
                yield _request(question_id(name, number, at), name, whole, _MEASURED[bool(said)])


def verdicts(
    judge: str, names: Iterable[str], cases: Sequence[EvalLine], answers: dict[str, LineAnswer]
) -> Iterator[Request]:
    """Requests for a judge's points of all answers that are there."""
    shape = {"choice": [str(points) for points in range(MOST_POINTS + 1)]}
    for name in names:
        for number, case in enumerate(cases, 1):
            answer = answers[question_id(name, number)]
            if answer.fault is not None:
                continue
            right = "" if case.answer is None else f"Right answer:\n{_text_of(case.answer)}\n\n"
            said = case.prompt or "\n".join(
                f"{one.get('role')}: {_said(one.get('content'))}" for one in case.messages or ()
            )
            content = _JUDGE.format(question=said, reference=right, answer=answer.text)
            seen = [*case.images, {"type": "text", "text": content}] if case.images else content
            asked = EvalLine(messages=[{"role": "user", "content": seen}])
            fields = {"max_tokens": 8, "structured_outputs": shape}
            yield _request(question_id(name, number), judge, asked, fields)


def write_requests(path: Path, requests: Iterable[Request]) -> None:
    with path.open("wb") as file:
        for request in requests:
            file.write(msgspec.json.encode(request) + b"\n")


def read_answers(*paths: Path) -> dict[str, LineAnswer]:
    """Answers by `custom_id`, from a batch's output and error files."""
    answers = {}
    for path in paths:
        with path.open("rb") as file:
            for record in map(_read_record, file):
                answers[record.custom_id or ""] = _answer(record)
    return answers


def likelihoods(answers: Sequence[LineAnswer]) -> list[float]:
    """Log-probability of each choice, in nats, from the first token that is not shared by all."""
    start = len(commonprefix([answer.ids for answer in answers]))
    return [sum(answer.logprobs[start:]) for answer in answers]


def _request(custom_id: str, model: str, case: EvalLine, fields: dict[str, Any]) -> Request:
    is_chat = case.messages is not None
    said = {"messages": case.messages} if is_chat else {"prompt": case.prompt}
    body = {"temperature": 0, **fields, **case.parameters, **said, "model": model}
    return Request(custom_id, f"/v1/{'chat/' if is_chat else ''}completions", body)


def _answer(record: BatchRecord) -> LineAnswer:
    if record.response is None:
        return LineAnswer(fault=record.error.message if record.error else "no answer")
    content = bytes(record.response.body)
    if not record.is_success:
        return LineAnswer(fault=error_text(content))
    body = json.loads(content)
    first, usage = body["choices"][0], body["usage"]
    prompt = first.get("prompt_logprobs") or body.get("prompt_logprobs") or []
    tokens = [next(iter(entry.items())) for entry in prompt if entry]
    return LineAnswer(
        text=(first.get("message") or {}).get("content") or first.get("text") or "",
        ids=tuple(int(token) for token, _ in tokens),
        logprobs=tuple(about["logprob"] for _, about in tokens),
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        created=body.get("created"),
        prompt_ids=tuple(first.get("prompt_token_ids") or body.get("prompt_token_ids") or ()),
        output_ids=tuple(first.get("token_ids") or ()),
        output_logprobs=logprobs_of(first.get("logprobs")) or (),
        cost=usage.get("cost"),
        device_s=usage.get("device_seconds"),
    )


def _said(content: Any) -> str:
    """A message's text; an image, which the judge sees before all, is named there."""
    if not isinstance(content, list):
        return _text_of(content)
    return "".join("[image]" if is_image(part) else _text_of(part.get("text")) for part in content)


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
