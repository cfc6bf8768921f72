"""Images by HTTP: answers about them are transformers' and PEFT's, token by token, by every API.
They go on elsewhere when a worker dies."""

import argparse
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from huggingface_hub import InferenceClient

import loraplex
from loraplex.adapters.errors import CommandError
from loraplex.launcher.evaluation.questions import questions, read_answers, read_cases
from loraplex.launcher.evaluation.scores import EvalLine
from loraplex.launcher.parity.command import _differences, spreads
from tests.e2e.picture_model import ADAPTERS, IMAGE, VIDEO, Oracle, save_all
from tests.e2e.serving import ROOT, Serving, running_folder
from tests.e2e.test_several_workers import until
from tests.launcher.batch.batch_files import line, records, write
from tests.router.pictures.seeing import data_url
from tests.server.pictures.files import written

pytestmark = pytest.mark.filterwarnings("ignore")
TIMEOUT_S, MOST = 240, 12
CLIENTS_PYTHON = ROOT / ".venv-clients/bin/python"
# transformers takes no placeholder that was drawn.
GREEDY: dict[str, Any] = {"temperature": 0, "logit_bias": {str(IMAGE): -100, str(VIDEO): -100}}
FILES = {
    "square": written("PNG", "RGB", 70, 61, 1),
    "wide": written("JPEG", "RGB", 200, 33, 2),
    "turned": written("JPEG", "RGB", 90, 120, 3, 6),
    "clear": written("WEBP", "RGBA", 64, 100, 4),
    "grey": written("GIF", "L", 300, 280, 5),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, Oracle]]:
    folder = tmp_path_factory.mktemp("pictured")
    save_all(folder)
    options = ("--max-body-bytes", str(32 << 20), "--files-dir", str(folder / "files"))
    with running_folder(folder, ADAPTERS, "--workers", "2", *options) as serving:
        yield serving, Oracle(folder)


def parts(*content: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[bytes]]:
    """A user's content as OpenAI's clients send it and as transformers reads it, and its files.
    content: names of FILES, and texts."""
    sent = list[dict[str, Any]]()
    read = list[dict[str, Any]]()
    for one in content:
        if one in FILES:
            sent.append({"type": "image_url", "image_url": {"url": data_url(FILES[one])}})
            read.append({"type": "image"})
        else:
            sent.append({"type": "text", "text": one})
            read.append({"type": "text", "text": one})
    return sent, read, [FILES[one] for one in content if one in FILES]


def post(serving: Serving, path: str, body: dict[str, Any], status: int = 200) -> Any:
    answer = httpx.post(f"{serving.url}{path}", json=body, timeout=TIMEOUT_S)
    assert answer.status_code == status, answer.text
    return answer.json()


CHATS = [
    ("base", ["square", "What is this?"]),
    ("one", ["square", "What is this?"]),
    ("two", ["Two:", "wide", "and", "clear", "differ how?"]),
    ("base", ["turned", "grey", "wide", "!"]),
    ("one", ["no image at all"]),
    ("two", ["square", "square", "the same?"]),
    ("base", ["square", "What is this?"]),  # a hit of the prefix cache
    ("base", ["wide", "What is this?"]),
]


def test_chats_are_those_of_transformers(served: tuple[Serving, Oracle]) -> None:
    serving, oracle = served
    found: dict[int, Any] = {}

    def ask(index: int, model: str, content: list[str]) -> None:
        sent, _, _ = parts(*content)
        body = {"messages": [{"role": "user", "content": sent}], "max_tokens": MOST, **GREEDY}
        body |= {"return_token_ids": True, "model": model if model != "base" else ""}
        found[index] = post(serving, "/v1/chat/completions", body)

    threads = [threading.Thread(target=ask, args=(i, *chat)) for i, chat in enumerate(CHATS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, (model, content) in enumerate(CHATS):
        _, read, files = parts(*content)
        messages = [{"role": "user", "content": read}]
        adapter = None if model == "base" else model
        prompt, answer = oracle.answer(messages, files, adapter, MOST)
        choice = found[index]["choices"][0]
        assert found[index]["prompt_token_ids"] == prompt, content
        assert choice["token_ids"] == answer, content
        assert found[index]["usage"]["prompt_tokens"] == len(prompt)


def test_sizes_that_a_request_asks_for(served: tuple[Serving, Oracle]) -> None:
    """Beside the same image in its usual size, whose results and pages are kept."""
    serving, oracle = served
    sent, read, files = parts("wide", "so?")
    sized = [sent[0] | {"min_pixels": 1568, "max_pixels": 3136}, *sent[1:]]
    usual = dict(oracle.processor.size)
    asked = [
        (sent, {}, usual),
        (sized, {}, {"shortest_edge": 1568, "longest_edge": 3136}),
        (sent, {"mm_processor_kwargs": {"max_pixels": 3136}}, usual | {"longest_edge": 3136}),
        (sent, {}, usual),
    ]
    prompts = []
    for content, options, size in asked:
        messages = [{"role": "user", "content": content}]
        body = {"model": "one", "messages": messages, "max_tokens": MOST, **GREEDY, **options}
        found = post(serving, "/v1/chat/completions", body | {"return_token_ids": True})
        said = [{"role": "user", "content": read}]
        prompt, answer = oracle.answer(said, files, "one", MOST, size=size)
        assert found["prompt_token_ids"] == prompt
        assert found["choices"][0]["token_ids"] == answer
        prompts.append(len(prompt))
    assert prompts[1] < prompts[0]


@pytest.mark.exhaustive
def test_a_photo_of_twelve_megapixels(tmp_path: Path) -> None:
    save_all(tmp_path)
    changes = {
        "config.json": ('"max_position_embeddings": 1024', '"max_position_embeddings": 32768'),
        "preprocessor_config.json": ('"longest_edge": 31360', '"longest_edge": 12845056'),
    }
    for name, (old, new) in changes.items():
        file = tmp_path / "base" / name
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))
    photo = written("JPEG", "RGB", 4000, 3000, 7)
    content = [{"type": "image_url", "image_url": {"url": data_url(photo)}}]
    with running_folder(tmp_path, ["two"], "--max-body-bytes", str(64 << 20)) as serving:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **GREEDY}
        found = post(serving, "/v1/chat/completions", body | {"return_token_ids": True})
        seen = post(
            serving, "/v1/chat/completions", body | {"return_token_ids": True, "model": "two"}
        )
    oracle, read = Oracle(tmp_path), [{"role": "user", "content": [{"type": "image"}]}]
    for answered, adapter in ((found, None), (seen, "two")):
        prompt, answer = oracle.answer(read, [photo], adapter, 4)
        assert len(prompt) > 15_000
        assert answered["prompt_token_ids"] == prompt
        assert answered["choices"][0]["token_ids"] == answer


def test_other_apis_answer_the_same(served: tuple[Serving, Oracle]) -> None:
    serving, oracle = served
    url = data_url(FILES["wide"])
    source = {"type": "base64", "media_type": "image/jpeg", "data": url.partition(",")[2]}
    chat = {"messages": [{"role": "user", "content": parts("wide", "so?")[0]}], "max_tokens": MOST}
    first = post(serving, "/v1/chat/completions", {"model": "one", **chat, "temperature": 0})
    text = first["choices"][0]["message"]["content"]
    said = [
        {"type": "input_image", "image_url": url, "detail": "auto"},
        {"type": "input_text", "text": "so?"},
    ]
    body = {"model": "one", "input": [{"role": "user", "content": said}], "temperature": 0}
    answer = post(serving, "/v1/responses", {**body, "max_output_tokens": MOST})
    assert answer["output"][0]["content"][0]["text"] == text
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "so?"}]
    asked = {"model": "one", "messages": [{"role": "user", "content": blocks}]}
    answer = post(serving, "/v1/messages", {**asked, "max_tokens": MOST, "temperature": 0})
    assert answer["content"][0]["text"] == text
    counted = post(serving, "/v1/messages/count_tokens", asked)
    assert counted["input_tokens"] == first["usage"]["prompt_tokens"]
    prompt = post(serving, "/detokenize", {"tokens": [72, 105]})["prompt"]
    marked = {"inputs": f"![]({url}){prompt}", "parameters": {"max_new_tokens": MOST}}
    generated = post(serving, "/generate", marked)
    assert generated["generated_text"]
    rendered = oracle.prompt([{"role": "user", "content": parts("wide", "so?")[1]}])
    beside = {"text": rendered, "image_data": url, "lora_path": "one"}
    drawn = {"temperature": 0, "max_new_tokens": MOST}
    generated = post(serving, "/generate", {**beside, "sampling_params": drawn})
    assert generated["text"] == text
    assert generated["meta_info"]["prompt_tokens"] == first["usage"]["prompt_tokens"]


def test_uploaded_images_and_batches_answer_the_same(served: tuple[Serving, Oracle]) -> None:
    serving, _ = served
    client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key="unused", max_retries=0)
    stored = client.files.create(file=("wide.jpg", FILES["wide"]), purpose="vision")
    chat = {"messages": [{"role": "user", "content": parts("wide", "so?")[0]}], "max_tokens": MOST}
    chat |= {"model": "one", "temperature": 0}
    text = post(serving, "/v1/chat/completions", chat)["choices"][0]["message"]["content"]
    said: Any = [
        {"type": "input_image", "file_id": stored.id, "detail": "auto"},
        {"type": "input_text", "text": "so?"},
    ]
    asked: Any = {"model": "one", "input": [{"role": "user", "content": said}], "temperature": 0}
    answer = client.responses.create(**asked, max_output_tokens=MOST)
    assert answer.output_text == text
    blocks = [
        {"type": "image", "source": {"type": "file", "file_id": stored.id}},
        {"type": "text", "text": "so?"},
    ]
    body = {"model": "one", "max_tokens": MOST, "temperature": 0}
    body |= {"messages": [{"role": "user", "content": blocks}]}
    assert post(serving, "/v1/messages", body)["content"][0]["text"] == text
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat}
    lines = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=lines.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    until(serving, lambda: client.batches.retrieve(batch.id).status == "completed")
    output = client.batches.retrieve(batch.id).output_file_id
    assert output is not None
    answered = json.loads(client.files.content(output).text)["response"]["body"]
    client.close()
    assert answered["choices"][0]["message"]["content"] == text


@pytest.mark.exhaustive
def test_programs_and_batch_jobs_answer_the_same(
    served: tuple[Serving, Oracle], tmp_path: Path
) -> None:
    serving, oracle = served
    conversations = [[{"role": "user", "content": parts(*content)[0]}] for _, content in CHATS[:4]]
    names = [None if model == "base" else model for model, _ in CHATS[:4]]
    expected = []
    for (_, content), name in zip(CHATS[:4], names, strict=True):
        _, read, files = parts(*content)
        expected.append(oracle.answer([{"role": "user", "content": read}], files, name, MOST))
    asked: dict[str, Any] = {"max_tokens": MOST, **GREEDY}
    adapters = {name: f"local:{oracle.folder / name}" for name in ADAPTERS}
    options: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "adapter_root": str(oracle.folder),
    }
    with loraplex.serve(oracle.folder / "base", adapters=adapters, **options) as engine:
        outputs = engine.chat(conversations, adapter=names, **asked)
        for output, (prompt, answer) in zip(outputs, expected, strict=True):
            assert (list(output.token_ids), output.prompt_tokens) == (answer, len(prompt))
        chunks = [*engine.stream(conversations[0], **asked)]
        assert sum((chunk.token_ids for chunk in chunks), ()) == outputs[0].token_ids
    bodies = [
        {"model": name or "", "messages": messages, "return_token_ids": True, **asked}
        for name, messages in zip(names, conversations, strict=True)
    ]
    lines = [line(str(i), "/v1/chat/completions", body) for i, body in enumerate(bodies)]
    source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "loraplex", "batch", str(source), "--out", str(out)]
    ended = subprocess.run(
        [*command, "--url", serving.url], cwd=ROOT, timeout=TIMEOUT_S, check=True
    )
    assert ended.returncode == 0
    answered = {int(one["custom_id"]): one["response"]["body"] for one in records(out)}
    found = [answered[i]["choices"][0]["token_ids"] for i in range(len(bodies))]
    assert found == [answer for _, answer in expected]


def test_parity_of_texts(served: tuple[Serving, Oracle], tmp_path: Path) -> None:
    """Special tokens of an answer are compared, too."""
    serving, oracle = served
    said = [{"role": "user", "content": "What is a picture?"}]
    lines = [EvalLine(messages=said, parameters={"logit_bias": {"256": 100}}), EvalLine(prompt="a")]
    records = []
    for asked in questions("logprobs", ["one"], lines, 6):
        body = post(serving, asked.url, asked.body)
        response = {"status_code": 200, "request_id": None, "body": body}
        record = {"id": "x", "custom_id": asked.custom_id, "response": response, "error": None}
        records.append(json.dumps(record))
    (tmp_path / "answers").write_text("\n".join(records))
    base = {"model": oracle.folder / "base", "revision": None, "device": "cpu"}
    arguments = argparse.Namespace(**base, peft_dtype="float32")
    answers = read_answers(tmp_path / "answers").values()
    found = spreads(list(_differences(arguments, oracle.folder / "one", answers)))
    counts = {one.tokens_at: one.tokens for one in found}
    assert (counts["answer"], found[0].max < 1e-4) == (12, True)
    seen = {"messages": [{"role": "user", "content": parts("wide")[0]}]}
    pictured = write(tmp_path / "p.jsonl", [json.dumps(seen).encode()])
    with pytest.raises(CommandError, match="no images"):
        read_cases(pictured, "logprobs")


BAD = [
    (b"GIF89a", "no PNG|breaks off"),
    (FILES["square"][:30], "cannot be decoded: its headers are broken"),
    (FILES["square"][:200], "cannot be decoded"),
    (written("PNG", "RGB", 4000, 8), "times longer"),
]


@pytest.mark.parametrize(("data", "words"), BAD)
def test_bad_images_are_named(served: tuple[Serving, Oracle], data: bytes, words: str) -> None:
    urls = [data_url(FILES["wide"]), data_url(data)]
    sent = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    client = openai.OpenAI(base_url=f"{served[0].url}/v1", api_key="unused", max_retries=0)
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        client.chat.completions.create(
            model="one",
            messages=[{"role": "user", "content": sent}],  # type: ignore[list-item,misc]
        )
    client.close()
    assert caught.value.code == "invalid_image"
    assert caught.value.param == "messages[0].content[1].image_url"
    assert "0x" not in caught.value.message


def test_a_stream_goes_on_when_its_worker_dies(served: tuple[Serving, Oracle]) -> None:
    serving, oracle = served
    sent, read, files = parts("turned", "long?")
    body = {"messages": [{"role": "user", "content": sent}], "max_tokens": 400, **GREEDY}
    body |= {"model": "two", "stream": True, "return_token_ids": True, "ignore_eos": True}
    ids, killed = list[int](), False
    url = f"{serving.url}/v1/chat/completions"
    spent = {worker: _cpu(worker) for worker in workers_of(serving)}
    with httpx.stream("POST", url, json=body, timeout=TIMEOUT_S) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            choices = json.loads(line[6:])["choices"]
            ids += choices[0].get("token_ids") or [] if choices else []
            if len(ids) > 100 and not killed:
                killed = True
                busy = max(spent, key=lambda worker: _cpu(worker) - spent[worker])
                busy.kill()
    metrics = httpx.get(f"{serving.url}/metrics").text
    assert 'loraplex_resumes_total{cause="engine_lost"} 1.0' in metrics
    messages = [{"role": "user", "content": read}]
    _, expected = oracle.answer(messages, files, "two", 40)
    assert len(ids) == 400
    assert ids[:40][: len(expected)] == expected


def workers_of(serving: Serving) -> list[psutil.Process]:
    """Processes that have an engine below them."""
    below = psutil.Process(serving.process.pid).children(recursive=True)
    return [process for process in below if process.children()]


def _cpu(worker: psutil.Process) -> float:
    return sum(sum(child.cpu_times()[:2]) for child in worker.children(recursive=True))


@pytest.mark.exhaustive
def test_published_clients_send_images(served: tuple[Serving, Oracle]) -> None:
    asked = subprocess.run(
        [CLIENTS_PYTHON, "-m", "tests.e2e.clients.with_images", served[0].url],
        input=FILES["wide"],
        cwd=ROOT,
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert asked.returncode == 0, (asked.stdout + asked.stderr).decode()[-2000:]
    hub = InferenceClient(f"{served[0].url}/v1", api_key="unused")
    sent, _, _ = parts("wide", "What is this?")
    messages = [{"role": "user", "content": sent}]
    answer = hub.chat_completion(messages, model="one", max_tokens=MOST, temperature=0)
    assert answer.usage.prompt_tokens > 8
