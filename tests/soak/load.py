"""Clients of a soak: the ways of `tests.chaos.load`, and those that a long run adds to them."""

import asyncio
import json
import random
import re
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from loraplex.adapters.common.newest import NewestKept
from tests.chaos.load import (
    DIGEST_HEADER,
    Answer,
    Certifier,
    Clients,
    Kind,
    Order,
    Wrong,
    check,
    lorax,
    openai,
)
from tests.chaos.processes import Process, Served
from tests.pushed_versions import version
from tests.soak.seeing import IMAGE, Gallery, Seen

# Of an answer.
MIN_TOKENS, MAX_TOKENS = 10, 1500
REPEATED, REMEMBERED = 0.9, 512
# Of prompts that are repeated: how often in the way of the last time, so that drafts are right.
SAME_WAY = 0.9
PATTERN = "[a-z]{3,9}( [a-z]{3,9}){10,30}"
PUSHED, KEPT, ASKED_VERSIONS = "pushed", 32, 3
ROLLED, ROLLED_FROM, ROLLED_TO = "rolled", "pirate", "sql"
# Its own chat template reads no pictures.
TEMPLATED = "tools"
BATCH_LINES, MAX_LINE_TOKENS = 40, 300
# Of the vocabulary's last ids, and no special token.
HIGH_ID = 2045
PATIENCE_S = 240.0
POLL_S = 0.2
DETAIL = 1500


@dataclass
class Tally:
    """Sums of answers. streamed: tokens of streams. problems: of the first that were not right."""

    tokens: int = 0
    streamed: int = 0
    events: int = 0
    results: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def add(self, answer: Answer) -> None:
        self.tokens += answer.tokens
        self.streamed += answer.tokens if answer.pauses else 0
        self.events += len(answer.pauses)
        self.results[answer.result] += 1
        self.kinds[answer.name.split(" ", 1)[0]] += 1
        if answer.result in ("wrong", "failed") and len(self.problems) < 50:
            self.problems.append(f"{answer.name}: {answer.detail[:DETAIL]}")


class SoakCertifier(Certifier):
    """Some orders repeat a prompt, so that pages are reused and drafts are suggested. Prompts and
    answers are long enough for the device to lose their pages.
    """

    words = (8, 110)
    eos_percent = 0.05

    def __init__(self, served: Served) -> None:
        super().__init__(served)
        self._asked: deque[tuple[str | None, str]] = deque(maxlen=REMEMBERED)
        self._retired: set[str] = set()
        self._gallery = Gallery(served.model)
        self._outputs = NewestKept[Any, list[int]](REMEMBERED)

    @property
    def names(self) -> list[str]:
        return sorted(self.digests.keys() - self._retired)

    def order(self, dice: random.Random, min_tokens: int, max_tokens: int) -> Order:
        if self._asked and dice.random() < REPEATED:
            adapter, prompt = dice.choice(self._asked)
            if adapter not in self._retired:
                count = dice.randint(min_tokens, max_tokens)
                return self.ordered(dice, adapter, prompt, count)
        order = super().order(dice, min_tokens, max_tokens)
        self._asked.append((order.adapter, order.prompt))
        return order

    def seen(self, order: Order) -> list[Seen]:
        """The pictures that an order is asked with; the same with the same prompt."""
        dice = random.Random(order.prompt)
        return dice.sample(self._gallery.pictures, dice.randint(1, 2))

    def expected_seen(self, order: Order, text: str, special: bool) -> list[int]:
        """The right tokens of an order with its pictures. text: the prompt, with `IMAGE` for each.
        special: whether the tokenizer puts its own tokens around.
        """
        digest = None if order.adapter is None else self.digests[order.adapter]
        ids = self.tokenizer.encode(text, add_special_tokens=special).ids
        placed = self._gallery.placed(ids, self.seen(order))
        return self.output(digest, placed, order.max_tokens)

    def output(
        self, digest: str | None, ids: Sequence[int], count: int, allowed: Sequence[int] = ()
    ) -> list[int]:
        """The longest output is computed once; others are its beginning."""
        asked = digest, tuple(ids), tuple(allowed)
        if asked not in self._outputs:
            self._outputs[asked] = super().output(digest, ids, MAX_TOKENS, allowed)
        return self._outputs[asked][:count]

    def took(self, version: int, digest: str) -> None:
        """A version was pushed; the last few of them are asked for."""
        self.digests[f"{PUSHED}@{version}"] = digest
        self._retired |= {f"{PUSHED}@{n}" for n in range(1, version - ASKED_VERSIONS + 1)}


class SoakClients(Clients):
    """Beside streams and answers of every kind: pushes, rollouts and batches, one after the other.

    tally: in place of `answers`, which would not fit.
    """

    def __init__(self, routers: list[Process], certifier: SoakCertifier, seed: int) -> None:
        super().__init__(routers, certifier, seed)
        self.tally = Tally()
        self._soaked = certifier
        self._kinds += [self._whole_allowed, self._whole_shaped, self._whole_rolled]
        self._kinds += [self._stream_seen, self._whole_seen]
        self._pushes = 0
        self._ways = NewestKept[str, Kind](REMEMBERED)  # of prompts

    def _kind_for(self, order: Order) -> Kind:
        known = self._ways.get(order.prompt)
        if known is None or self._dice.random() >= SAME_WAY:
            known = super()._kind_for(order)
        self._ways[order.prompt] = known
        return known

    def _note(self, answer: Answer) -> None:
        self.tally.add(answer)

    async def register(self, name: str, reference: str) -> None:
        """Returns when all routers know the name, while nothing is wrong."""
        assert await self._call("POST", "/v1/adapters", json={"name": name, "ref": reference})
        async with asyncio.timeout(PATIENCE_S):
            for router in self._routers:
                await self._until_known(f"{router.url}/v1/adapters/{name}")

    async def _until_known(self, url: str) -> None:
        while (await self._http.get(url)).status_code != 200:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(POLL_S)

    async def run(self, count: int, min_tokens: int, max_tokens: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(super().run(count, min_tokens, max_tokens))
            for job in (self._push, self._roll_out, self._batch):
                tasks.create_task(self._repeat(job))

    async def _repeat(self, job: Any) -> None:
        while not self._stopping:
            await job()
            await asyncio.sleep(self._dice.uniform(1.0, 3.0))

    # Further ways to ask

    async def _whole_allowed(self, url: str, order: Order, answer: Answer) -> None:
        """A few ids alone may be drawn; a high one is among them, so that few draws are the end."""
        allowed = [*sorted(random.Random(order.prompt).sample(range(5, 2000), 20)), HIGH_ID]
        found = await self._whole(
            f"{url}/v1/completions", openai(order) | {"allowed_token_ids": allowed}, order
        )
        digest = None if order.adapter is None else self._certifier.digests[order.adapter]
        expected = self._certifier.expected(digest, order.prompt, order.max_tokens, allowed)
        check(found["choices"][0]["text"], self._certifier.text(expected))
        answer.tokens = len(expected)

    async def _whole_shaped(self, url: str, order: Order, answer: Answer) -> None:
        """Text of a pattern. Both choices are the same, since masks and tokens are."""
        body = openai(order) | {"structured_outputs": {"regex": PATTERN}, "n": 2, "max_tokens": 600}
        found = await self._whole(f"{url}/v1/completions", body, order)
        one, other = (choice["text"] for choice in found["choices"])
        check(one, other)
        if not re.fullmatch(PATTERN, one):
            raise Wrong(f"{one!r} does not match")
        answer.tokens = found["usage"]["completion_tokens"]

    async def _whole_rolled(self, url: str, order: Order, answer: Answer) -> None:
        """The head says which version answered; each token is that version's."""
        body = openai(order) | {"model": ROLLED}
        found, headers = await self._posted(f"{url}/v1/completions", body, order)
        digest = headers[DIGEST_HEADER]
        digests = self._certifier.digests
        if digest not in (digests[ROLLED_FROM], digests[ROLLED_TO]):
            raise Wrong(f"digest {digest} is no version's")
        expected = self._certifier.expected(digest, order.prompt, order.max_tokens)
        check(found["choices"][0]["text"], self._certifier.text(expected))
        answer.tokens = len(expected)

    async def _stream_seen(self, url: str, order: Order, answer: Answer) -> None:
        """Pictures before a text, as LoRAX marks them."""
        seen = self._soaked.seen(order)
        marked = "".join(f"![]({one.url})" for one in seen) + order.prompt
        body, ids = lorax(order) | {"inputs": marked}, list[int]()
        async for event in self._events(f"{url}/generate_stream", body, order, answer):
            ids.append(event["token"]["id"])
        text = IMAGE * len(seen) + order.prompt
        check(ids, self._soaked.expected_seen(order, text, special=True))
        answer.tokens = len(ids)

    async def _whole_seen(self, url: str, order: Order, answer: Answer) -> None:
        """Pictures behind a text, in a chat by the base's template."""
        if order.adapter == TEMPLATED:
            await self._stream_seen(url, order, answer)
            return
        seen = self._soaked.seen(order)
        images = [{"type": "image_url", "image_url": {"url": one.url}} for one in seen]
        content = [{"type": "text", "text": order.prompt}, *images]
        body = openai(order) | {"messages": [{"role": "user", "content": content}]}
        del body["prompt"]
        found = await self._whole(f"{url}/v1/chat/completions", body, order)
        text = f"<s><|user|>{order.prompt}{IMAGE * len(seen)}</s><|assistant|>"
        expected = self._soaked.expected_seen(order, text, special=False)
        check(found["choices"][0]["message"]["content"] or "", self._certifier.text(expected))
        answer.tokens = len(expected)

    # Jobs of operators

    async def _call(self, method: str, path: str, **given: Any) -> httpx.Response | None:
        """At a router that accepts connections; None where that router went away, or refuses for a
        while."""
        router = self._dice.choice(self._routers)
        try:
            response = await self._http.request(method, f"{router.url}{path}", **given)
        except (httpx.HTTPError, OSError):
            return None
        if response.status_code in (409, 429, 503):
            return None
        if response.status_code >= 400:
            raise AssertionError(f"{method} {path}: {response.status_code} {response.text[:300]}")
        return response

    async def _push(self) -> None:
        self._pushes += 1
        path = f"/v1/adapters/{PUSHED}?keep={KEPT}"
        answer = await self._call("PUT", path, files=version(self._pushes))
        if answer is not None:
            told = answer.json()
            await self._until_all_have(told["version"])
            self._soaked.took(told["version"], told["adapter"]["digest"])

    async def _until_all_have(self, version: int) -> None:
        """A router's table is a second old, and older where Redis is slow."""
        async with asyncio.timeout(PATIENCE_S):
            for router in self._routers:
                while await self._newest(router) < version:  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(POLL_S)

    async def _newest(self, router: Process) -> int:
        """The newest version that a router knows; 0 = none, or it is away."""
        try:
            answer = await self._http.get(f"{router.url}/v1/adapters/{PUSHED}")
        except (httpx.HTTPError, OSError):
            return 0
        kept = answer.json()["kept"] if answer.status_code == 200 else []
        return max((one["version"] for one in kept), default=0)

    async def _roll_out(self) -> None:
        """One version beside the other, with a share that the dice choose; 0 ends the rollout."""
        weight = self._dice.choice([0, 20, 50, 80])
        path = f"/v1/adapters/{ROLLED}/rollout"
        versions = [{"reference": f"local:{ROLLED_TO}", "weight": weight}]
        if weight:
            await self._call("POST", path, json={"versions": versions, "guards": None})
        else:
            await self._call("DELETE", path)

    async def _batch(self) -> None:
        """Each line is answered once, with its own tokens."""
        orders = [self._certifier.order(self._dice, 5, MAX_LINE_TOKENS) for _ in range(BATCH_LINES)]
        lines = [_line(number, order) for number, order in enumerate(orders)]
        form = {"files": {"file": ("lines.jsonl", "\n".join(lines))}, "data": {"purpose": "batch"}}
        file = await self._call("POST", "/v1/files", **form)
        if file is None:
            return
        asked = {"endpoint": "/v1/completions", "completion_window": "24h"}
        asked["input_file_id"] = file.json()["id"]
        batch = await self._call("POST", "/v1/batches", json=asked)
        if batch is not None:
            await self._check_batch(await self._ended(batch.json()["id"]), orders)

    async def _ended(self, batch_id: str) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                shown = await self._call("GET", f"/v1/batches/{batch_id}")
                batch: dict[str, Any] = shown.json() if shown is not None else {"status": ""}
                if batch["status"] in ("completed", "failed", "expired"):
                    return batch
                await asyncio.sleep(POLL_S)

    async def _check_batch(self, batch: dict[str, Any], orders: list[Order]) -> None:
        found, failed = dict[int, str](), dict[int, str]()
        is_done = batch["status"] == "completed"
        for line in await self._lines_of(batch["output_file_id"] if is_done else None):
            text = line["response"]["body"]["choices"][0]["text"]
            found[int(line["custom_id"])] = text
        for line in await self._lines_of(batch["error_file_id"]):
            failed[int(line["custom_id"])] = json.dumps(line)
        for number, order in enumerate(orders):
            answer = Answer("batch_line", 0.0, tokens=len(order.expected))
            if found.get(number) != self._certifier.text(order.expected):
                said = found.get(number, failed.get(number))
                answer.tokens, answer.detail = 0, f"{batch['status']}: {said!r}"
                answer.result = "wrong" if number in found else "failed"
            self._note(answer)

    async def _lines_of(self, file_id: str | None) -> list[Any]:
        """The lines of a batch's file, if there is one."""
        content = None
        while file_id and content is None:
            content = await self._call("GET", f"/v1/files/{file_id}/content")
        return [] if content is None else [json.loads(line) for line in content.text.splitlines()]


def _line(number: int, order: Order) -> str:
    line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions"}
    return json.dumps({**line, "body": openai(order)})
