"""Adapters whose tokenizer has tokens that the base's has not, by HTTP: text, ids and
log-probabilities of what PEFT and transformers load."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
import torch
from openai import OpenAI
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AddedToken, PreTrainedTokenizerFast

from loraplex.launcher.bench.engine.offline import tokenizer_json
from tests.e2e.cut_streams import CutStreams, resumes, worker
from tests.e2e.serving import Serving, running_folder
from tests.e2e.test_drafts import engine
from tests.server.model.families.parity import TOLERANCE, prompt
from tests.server.model.hub_models import VOCAB, make_model, reference_logprobs, save_model

# `tests/server/model/lora` and `tests/router/text` have added tokens in a short run.
pytestmark = [pytest.mark.exhaustive, pytest.mark.filterwarnings("ignore")]
TIMEOUT_S = 240
MOST_RUNS = 32
LONG = 200  # tokens of an answer that is long enough to be cut
FAMILY = "llama3"
CALL, TURN, MARK = "<call>", "<|turn|>", "<mark/>"
TABLES = ["embed_tokens", "lm_head"]
# By tokens of the base: tables with room for more, and tables without. Of each adapter: tokens that
# follow, rows of the tables (VOCAB: as the base has them), and the config's words.
Adapters = dict[str, tuple[list[str], int, dict[str, Any]]]
ADAPTERS: dict[int, Adapters] = {
    90: {
        "plain": ([], VOCAB, {}),
        "resized": ([CALL, TURN, MARK], 93, {}),
        "trained": ([CALL, TURN], 92, {"modules_to_save": TABLES}),
        "inside": ([TURN, CALL], VOCAB, {"trainable_token_indices": [90, 91]}),
    },
    VOCAB: {
        "plain": ([], VOCAB, {}),
        "resized": ([CALL, TURN, MARK], VOCAB + 3, {}),
        "trained": ([CALL, TURN], 128, {"modules_to_save": TABLES}),
        "rows": (
            [TURN, CALL],
            VOCAB + 2,
            {"trainable_token_indices": dict.fromkeys(TABLES, [VOCAB, VOCAB + 1])},
        ),
    },
}
# Whose file has no whole tables.
ROWS_ALONE = ("inside", "rows")
TEMPLATE = "{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}<|turn|>"
TEXT = "<|turn|>a<call>bc <call>d"


class Adding(NamedTuple):
    """A server, and what PEFT and transformers make of each adapter's folder. known: tokens of the
    base."""

    known: int
    serving: Serving
    oracles: dict[str, PeftModel]
    tokenizers: dict[str, Any]

    @property
    def adapters(self) -> Adapters:
        return ADAPTERS[self.known]

    @property
    def adding(self) -> list[str]:
        return [name for name, (added, _, _) in self.adapters.items() if added]

    @property
    def url(self) -> str:
        return self.serving.url


def tokenizer_of(folder: Path, added: list[str]) -> PreTrainedTokenizerFast:
    make: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = make(tokenizer_file=str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, special=text == TURN) for text in added])
    if added:
        tokenizer.eos_token = TURN
        tokenizer.chat_template = TEMPLATE
    return tokenizer


def base_of(size: int) -> Any:
    model = make_model(FAMILY)
    if size != VOCAB:
        model.resize_token_embeddings(size, mean_resizing=False)
    return model


def save_adapter(base: Path, folder: Path, known: int, name: str, seed: int) -> Any:
    added, size, options = ADAPTERS[known][name]
    saves_tables = size != VOCAB and name not in ROWS_ALONE
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **options)
    torch.manual_seed(seed)
    model = get_peft_model(base_of(size), config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.requires_grad or (saves_tables and "layers" not in parameter_name):
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder, save_embedding_layers=saves_tables)
    tokenizer = tokenizer_of(base, added)
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture(
    scope="module",
    params=[(90, 1), (VOCAB, 2), (VOCAB, 1)],
    ids=lambda row: f"{row[0]}-{row[1]}",
)
def adding(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Adding]:
    """Of one process, and of two that share the base."""
    folder, (known, processes) = tmp_path_factory.mktemp("adding"), request.param
    base = save_model(make_model(FAMILY), folder / "base")
    (base / "tokenizer.json").write_text(tokenizer_json(known, (0, 1, 2)))
    tokenizers: dict[str, Any] = {"base": tokenizer_of(base, [])}
    oracles: dict[str, Any] = {"base": make_model(FAMILY)}
    for seed, (name, (_, size, _)) in enumerate(ADAPTERS[known].items()):
        tokenizers[name] = save_adapter(base, folder / name, known, name, seed)
        oracles[name] = PeftModel.from_pretrained(base_of(size), str(folder / name)).eval()
    options = (
        *("--adapter-slots", "2", "--max-draft", "6" if known == VOCAB else "0"),
        *("--max-step-tokens", "40", "--allow-other-base", "--model-name", "base"),
        *("--tp", str(processes), "--files-dir", str(folder / "files")),
    )
    with running_folder(folder, ADAPTERS[known], *options) as serving:
        yield Adding(known, serving, oracles, tokenizers)


def post(adding: Adding, path: str, body: dict[str, Any], status: int = 200) -> Any:
    answer = httpx.post(f"{adding.url}{path}", json=body, timeout=TIMEOUT_S)
    assert answer.status_code == status, answer.text
    return answer.json()


def complete(adding: Adding, model: str, text: str | list[int], **fields: Any) -> Any:
    body = {"model": model, "prompt": text, "max_tokens": 6, "temperature": 0, "logprobs": 1}
    body |= {"return_token_ids": True, "ignore_eos": True, "skip_special_tokens": False}
    [choice] = post(adding, "/v1/completions", body | fields)["choices"]
    return choice


def test_text_becomes_the_ids_of_each_adapters_tokenizer(adding: Adding) -> None:
    for name, tokenizer in adding.tokenizers.items():
        expected = tokenizer.encode(TEXT)
        found = post(adding, "/tokenize", {"model": name, "prompt": TEXT})["tokens"]
        assert found == expected, name
        assert (max(found) >= adding.known) == (name not in ("base", "plain"))
        told = post(adding, "/detokenize", {"model": name, "tokens": expected})
        assert told["prompt"] == tokenizer.decode(expected), name


def test_answers_are_those_of_peft(adding: Adding) -> None:
    """In one batch, with more adapters than slots: each is evicted and loaded again."""
    long = "".join(f"{CALL}{text}{TURN}" for text in ("ab", "the", "x y", "zz", "qq q", "e"))
    asked = [(name, text) for text in (TEXT, "ab", 2 * long) for name in adding.oracles]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda of: complete(adding, *of), asked))
    for (name, text), choice in zip(asked, answers, strict=True):
        ids, tokens = adding.tokenizers[name].encode(text), choice["token_ids"]
        adapter = None if name == "base" else "default"
        rows = reference_logprobs(adding.oracles[name], adapter, [*ids, *tokens])[len(ids) - 1 : -1]
        expected = [row[token].item() for row, token in zip(rows, tokens, strict=True)]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=TOLERANCE), name
        assert expected == pytest.approx(rows.max(dim=-1).values.tolist(), abs=TOLERANCE), name
        assert choice["text"] == adding.tokenizers[name].decode(tokens), name


def test_an_answer_has_the_text_of_added_tokens(adding: Adding) -> None:
    for name in adding.adding:
        token_id = adding.tokenizers[name].convert_tokens_to_ids(CALL)
        fields: dict[str, Any] = {"logit_bias": {str(token_id): 100}, "max_tokens": 3}
        choice = complete(adding, name, "ab", **fields)
        assert (choice["text"], choice["token_ids"]) == (3 * CALL, 3 * [token_id])
        assert choice["logprobs"]["tokens"] == 3 * [CALL]
        client = OpenAI(base_url=f"{adding.url}/v1", api_key="none", timeout=TIMEOUT_S)
        stream = client.completions.create(
            model=name, prompt="ab", stream=True, temperature=0, **fields
        )
        assert "".join(chunk.choices[0].text for chunk in stream) == 3 * CALL
        stopped = complete(adding, name, "ab", **fields, stop=[CALL])
        assert (stopped["text"], stopped["finish_reason"]) == ("", "stop")
        banned = complete(adding, name, "ab", **fields, bad_words=[CALL])
        assert token_id not in banned["token_ids"]
        shape = {"structured_outputs": {"regex": "[ab]{3}"}, "ignore_eos": False}
        held = complete(adding, name, "ab", **fields, **shape)
        assert set(held["text"]) <= {"a", "b"}


def test_an_adapters_template_and_end_are_its_own(adding: Adding) -> None:
    for name in adding.adding:
        tokenizer = adding.tokenizers[name]
        messages = [{"role": "user", "content": f"a{CALL}b"}]
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        found = post(adding, "/tokenize", {"model": name, "messages": messages})["tokens"]
        assert found == ids, name
        end = tokenizer.convert_tokens_to_ids(TURN)
        body = {"model": name, "messages": messages, "max_tokens": 5, "temperature": 0}
        answer = post(adding, "/v1/chat/completions", body | {"logit_bias": {str(end): 100}})
        [choice] = answer["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", ""), name
        assert answer["usage"] == {
            **answer["usage"],
            "prompt_tokens": len(ids),
            "completion_tokens": 1,
        }


def test_ids_that_an_adapter_does_not_have_are_refused(adding: Adding) -> None:
    sizes = {name: size for name, (_, size, _) in adding.adapters.items()}
    for name, size in (sizes | {"base": VOCAB}).items():
        body = {"model": name, "prompt": [5, size], "max_tokens": 1}
        answer = post(adding, "/v1/completions", body, status=400)
        assert f"from 0 to {size - 1}, got {size}" in answer["error"]["message"]
        for field, value in (("stop_token_ids", [size]), ("logit_bias", {str(size): 1})):
            asked = {"model": name, "prompt": [5], "max_tokens": 1, field: value}
            answer = post(adding, "/v1/completions", asked, status=400)
            assert f"from 0 to {size - 1}" in answer["error"]["message"], field


def test_the_base_never_answers_with_text_of_added_tokens(adding: Adding) -> None:
    for token_id in range(adding.known, VOCAB):
        fields = {"logit_bias": {str(token_id): 100}, "max_tokens": 2}
        for name in ("base", "plain"):
            assert complete(adding, name, "ab", **fields)["text"] == ""


def test_adapters_that_add_tokens_are_not_merged_or_scaled(adding: Adding) -> None:
    for name in adding.adding:
        body = {"model": name, "prompt": "a", "max_tokens": 1, "adapter_scale": 0.5}
        answer = httpx.post(f"{adding.url}/v1/completions", json=body, timeout=TIMEOUT_S)
        assert not answer.is_success
        assert "merge" in answer.text


def test_prompts_of_many_lengths(adding: Adding) -> None:
    for length in (3, 50):
        for name in adding.adding:
            first, known = adding.known, prompt(length, length)
            ids = [first, *(i % first for i in known), first + 1]
            tokens = complete(adding, name, ids)["token_ids"]
            rows = reference_logprobs(adding.oracles[name], "default", [*ids, *tokens])
            best = rows[len(ids) - 1 : -1].max(dim=-1).values.tolist()
            found = [rows[len(ids) - 1 + i, token].item() for i, token in enumerate(tokens)]
            assert found == pytest.approx(best, abs=TOLERANCE)


def test_drawn_answers_repeat_whatever_is_beside_them(adding: Adding) -> None:
    """Alone and in one batch, with every rule that looks at tokens."""
    fields: dict[str, Any] = {"temperature": 1.2, "seed": 7, "top_p": 0.9, "max_tokens": 12}
    fields |= {"repetition_penalty": 1.2, "presence_penalty": 0.1, "min_tokens": 4, "logprobs": 3}
    names = [*adding.oracles, *adding.oracles]

    def answer(name: str) -> Any:
        ids = [adding.known, 5] if name in adding.adding else [7, 5]
        choice = complete(adding, name, ids, **fields, bad_words=["b", " a"])
        return choice["token_ids"], choice["text"]

    alone = {name: answer(name) for name in adding.oracles}
    with ThreadPoolExecutor(len(names)) as pool:
        together = list(pool.map(answer, names))
    assert together == [alone[name] for name in names]


def test_an_answer_with_a_shape_has_no_added_tokens_but_its_end(adding: Adding) -> None:
    for name in adding.adding:
        call, end = (adding.tokenizers[name].convert_tokens_to_ids(t) for t in (CALL, TURN))
        choice = complete(
            adding,
            name,
            "ab",
            logit_bias={str(call): 100, str(end): 50},
            structured_outputs={"regex": "[ab]{2,5}"},
            ignore_eos=False,
            max_tokens=20,
        )
        assert choice["finish_reason"] == "stop", name
        assert (len(choice["text"].replace(TURN, "")), choice["token_ids"][-1]) == (2, end)
        allowed = complete(adding, name, "ab", allowed_token_ids=[call], max_tokens=3)
        assert allowed["token_ids"] == 3 * [call]


def long_bodies(adding: Adding) -> list[dict[str, Any]]:
    """Every adapter with new tokens, greedy and drawn, with rules that count tokens."""
    first = adding.known
    fixed: dict[str, Any] = {
        "stream": True,
        "max_tokens": LONG,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    fixed |= {"skip_special_tokens": False, "logit_bias": {f"{first}": 7, f"{first + 1}": 7}}
    fixed |= {"frequency_penalty": 0.4, "presence_penalty": 0.2}
    return [
        {"model": name, "prompt": [5, first, 7, first + 1], **fixed, **how}
        for name in adding.adding
        for how in ({"temperature": 0}, {"temperature": 1.2, "seed": 7})
    ]


@pytest.mark.parametrize("find", [engine, worker])
async def test_a_killed_process_costs_no_token(
    adding: Adding, find: Callable[[Serving], psutil.Process | None]
) -> None:
    """New ids are in prompts, and among the tokens that came before the kill."""
    serving, bodies = adding.serving, long_bodies(adding)
    expected = await CutStreams(serving).run(bodies)
    assert all(len(ids) == LONG and len(set(ids)) > 8 for ids, _ in expected)
    before, cut = resumes(serving), set[int]()
    for _ in range(MOST_RUNS):  # the engine may be done before its first tokens are read here
        killed = CutStreams(serving, find, spared=cut)
        assert await killed.run(bodies) == expected
        cut |= {number for number, ids in killed.cut.items() if max(ids) >= adding.known}
        if resumes(serving) - before >= len(bodies) == len(cut):
            return
    raise AssertionError(f"{resumes(serving) - before} answers were cut, those of {cut}")


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_lines_of_a_batch_are_answered_as_requests(adding: Adding, route: Any) -> None:
    """Lines of the base and of adapters with and without new tokens, mixed."""
    is_chat = route.endswith("chat/completions")
    fixed = {"max_tokens": 12, "temperature": 0, "skip_special_tokens": False}
    bodies = [
        {"model": name, **fixed}
        | ({"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text})
        for text in (TEXT, "ab")
        for name in (adding.adding if is_chat else adding.oracles)
    ]
    lines = [
        json.dumps({"custom_id": f"{number}", "method": "POST", "url": route, "body": body})
        for number, body in enumerate(bodies)
    ]
    api = OpenAI(base_url=f"{adding.url}/v1", api_key="none", timeout=TIMEOUT_S)
    file = api.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = api.batches.create(input_file_id=file.id, endpoint=route, completion_window="24h")
    deadline = time.monotonic() + TIMEOUT_S
    while batch.status not in ("completed", "failed", "expired"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)  # polls a condition, bounded by the deadline
        batch = api.batches.retrieve(batch.id)
    assert batch.output_file_id is not None, batch
    records = map(json.loads, api.files.content(batch.output_file_id).text.splitlines())
    found = {record["custom_id"]: record["response"]["body"]["choices"] for record in records}
    expected = [post(adding, route, body)["choices"] for body in bodies]
    assert found == {f"{number}": choices for number, choices in enumerate(expected)}
    assert len({str(choices) for choices in expected}) > len(bodies) // 2
