"""Clients that know every token they must get: each answer proves its prompt, adapter and order."""

import asyncio
import json
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

import httpx
import msgspec
from tokenizers import Tokenizer

from tests.certifying.certificates import CertifyOptions, certified_output
from tests.chaos.posts import Broken, Refused, Transport, posting
from tests.chaos.processes import Process, Served, demo

TIMEOUT_S = 240.0
RETRY_S = 0.05
DIGEST_HEADER = "x-loraplex-adapter-digest"

# ok; wrong tokens; failed though the request's router lived; broken by the death of its router.
Result = Literal["ok", "wrong", "failed", "broken"]


@dataclass
class Answer:
    """One request. pauses: (from, to) of a stream's waits, from the question to the last event.
    tokens: number of right ones.
    """

    name: str
    started: float
    result: Result = "ok"
    detail: str = ""
    ended: float = 0.0
    tokens: int = 0
    pauses: list[tuple[float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Order:
    """A request and its right answer. stop_at: where in the text a stop string is, 0 to 1.
    expect: makes the right tokens, of which not every way to ask has need.

    Whoever asks again with the same key must ask for the same.
    """

    adapter: str | None
    prompt: str
    expect: Callable[[], list[int]]
    max_tokens: int
    key: str
    stop_at: float

    @cached_property
    def expected(self) -> list[int]:
        return self.expect()


# Sends an order to the router at a URL, and checks what comes.
Kind = Callable[[str, Order, "Answer"], Awaitable[None]]


class Wrong(Exception):
    """Another answer than the certified one."""


class Certifier:
    """Knows the right tokens. digests: adapter name -> digest, learnt while all was calm.
    words: how many a prompt has, at least and at most. eos_percent: as of `CertifyOptions`.
    """

    words = (8, 8)
    eos_percent: float = 1

    def __init__(self, served: Served | None = None) -> None:
        self.served = served or demo()
        folder = self.served.model
        model = json.loads((folder / "config.json").read_text())
        eos = model["eos_token_id"]
        self._options = CertifyOptions(
            vocab_size=model["vocab_size"],
            eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,),
            eos_percent=self.eos_percent,
        )
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        added = self.tokenizer.get_added_tokens_decoder()
        special = {number for number, token in added.items() if token.special}
        self.hidden_ids = special.difference(self._options.eos_token_ids)
        self.digests: dict[str, str] = {}

    @property
    def names(self) -> list[str]:
        """Adapters that are asked for."""
        return sorted(self.digests)

    def order(self, dice: random.Random, min_tokens: int, max_tokens: int) -> Order:
        adapter = dice.choice([None, *self.names])
        words = dice.choices(
            ["river", "stone", "lamp", "cloud", "seed"], k=dice.randint(*self.words)
        )
        prompt = f"{uuid.UUID(int=dice.getrandbits(128))} {' '.join(words)}"
        return self.ordered(dice, adapter, prompt, dice.randint(min_tokens, max_tokens))

    def ordered(self, dice: random.Random, adapter: str | None, prompt: str, count: int) -> Order:
        digest = None if adapter is None else self.digests[adapter]
        key = f"{dice.getrandbits(128):032x}"
        expect = partial(self.expected, digest, prompt, count)
        return Order(adapter, prompt, expect, count, key, dice.uniform(0.5, 1.0))

    def expected(
        self, digest: str | None, prompt: str, count: int, allowed: Sequence[int] = ()
    ) -> list[int]:
        """The right tokens. allowed: ids that alone may be drawn, beside ends; () = all."""
        ids = self.tokenizer.encode(prompt).ids
        return self.output(digest, ids, count, allowed)

    def output(
        self, digest: str | None, ids: Sequence[int], count: int, allowed: Sequence[int] = ()
    ) -> list[int]:
        """The right tokens behind a prompt's ids. allowed: as of `expected`."""
        return certified_output(digest, ids, count, self._options, allowed=allowed)

    def text(self, ids: list[int]) -> str:
        decoded: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return decoded

    def check_head(self, order: Order, headers: Mapping[str, str]) -> None:
        digest = None if order.adapter is None else self.digests[order.adapter]
        if headers.get(DIGEST_HEADER) != digest:
            raise Wrong(f"digest {headers.get(DIGEST_HEADER)}, expected {digest}")


def check(found: Any, expected: Any) -> None:
    if found != expected:
        raise Wrong(f"got {found!r}, expected {expected!r}")


class Clients:
    """`run` keeps `count` requests under way until `stop`; `answers` grows."""

    def __init__(self, routers: list[Process], certifier: Certifier, seed: int) -> None:
        self.answers: list[Answer] = []
        self._routers = routers
        self._certifier = certifier
        self._dice = random.Random(seed)
        self._stopping = False
        self._http = httpx.AsyncClient(
            timeout=TIMEOUT_S,
            transport=Transport(
                limits=httpx.Limits(max_keepalive_connections=0, max_connections=None)
            ),
        )
        self._kinds: list[Kind] = [
            self._stream_ids,
            self._whole_ids,
            self._stream_text,
            self._whole_text,
        ]

    async def learn(self) -> None:
        """Asks for each adapter once, while nothing is wrong."""
        router = self._routers[0]
        names = self._certifier.served.adapters
        for name in names:
            body = {"inputs": "x", "parameters": {"adapter_id": name, "max_new_tokens": 1}}
            answer = await self._http.post(f"{router.url}/generate", json=body)
            assert answer.status_code == 200, answer.text
            self._certifier.digests[name] = answer.headers[DIGEST_HEADER]
        digests = set(self._certifier.digests.values())
        assert len(digests) == len(names), "adapters must differ"

    async def run(self, count: int, min_tokens: int, max_tokens: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(count):
                tasks.create_task(self._client(min_tokens, max_tokens))

    def stop(self) -> None:
        """Requests under way are still finished."""
        self._stopping = True

    async def close(self) -> None:
        await self._http.aclose()

    async def _client(self, min_tokens: int, max_tokens: int) -> None:
        while not self._stopping:
            order = self._certifier.order(self._dice, min_tokens, max_tokens)
            kind = self._kind_for(order)
            answer = await self._ask(order, kind)
            self._note(answer)
            if answer.result == "broken":
                self._note(await self._ask_again(order, kind))

    def _kind_for(self, order: Order) -> Kind:
        return self._dice.choice(self._kinds)

    def _note(self, answer: Answer) -> None:
        self.answers.append(answer)

    async def _ask_again(self, order: Order, kind: Kind) -> Answer:
        """With the same key, until what the dead router claimed for it is free again."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                answer = await self._ask(order, kind)
                if "idempotency_conflict" not in answer.detail:
                    return answer
                await asyncio.sleep(RETRY_S)

    async def _ask(self, order: Order, kind: Kind) -> Answer:
        """At one router, which is chosen among those that accept connections."""
        while True:
            router = self._dice.choice(self._routers)
            answer = Answer(f"{kind.__name__[1:]} at {router.name}", time.monotonic())
            life = router.lives
            try:
                await kind(router.url, order, answer)
            except Refused:  # as any load balancer: the next one
                await asyncio.sleep(RETRY_S)
                continue
            except Wrong as error:
                answer.result, answer.detail = "wrong", str(error)
            except Broken as error:
                lived = router.lives == life and not router.dying
                answer.result = "failed" if lived else "broken"
                answer.detail = f"{type(error).__name__}: {error}"
            except Failed as error:
                answer.result, answer.detail = "failed", str(error)
            answer.ended = time.monotonic()
            return answer

    # Four ways to ask

    async def _stream_ids(self, url: str, order: Order, answer: Answer) -> None:
        ids = []
        async for event in self._events(f"{url}/generate_stream", lorax(order), order, answer):
            ids.append(event["token"]["id"])
        check(ids, order.expected)
        answer.tokens = len(ids)

    async def _whole_ids(self, url: str, order: Order, answer: Answer) -> None:
        body = lorax(order)
        body["parameters"]["details"] = True
        found = await self._whole(f"{url}/generate", body, order)
        check([token["id"] for token in found["details"]["tokens"]], order.expected)
        answer.tokens = len(order.expected)

    async def _stream_text(self, url: str, order: Order, answer: Answer) -> None:
        body = openai(order) | {"stream": True}
        text = ""
        async for event in self._events(f"{url}/v1/completions", body, order, answer):
            text += event["choices"][0]["text"]
        check(text, self._certifier.text(order.expected))
        answer.tokens = len(order.expected)

    async def _whole_text(self, url: str, order: Order, answer: Answer) -> None:
        """Up to a stop string out of the middle of the right answer."""
        text = self._certifier.text(order.expected)
        begin = round(order.stop_at * len(text))
        # A stop string may also be found in a token that the answer does not show.
        hidden = self._certifier.hidden_ids & set(order.expected)
        stop = "" if hidden else text[begin : begin + 9]
        body = openai(order) | ({"stop": [stop]} if stop else {})
        found = await self._whole(f"{url}/v1/completions", body, order)
        expected = text[: text.find(stop)] if stop else text
        if found["choices"][0]["text"] != expected:
            raise Wrong(f"got {found}, expected {expected!r} before {stop!r}; {order}")
        answer.tokens = found["usage"]["completion_tokens"]

    async def _whole(self, url: str, body: dict[str, Any], order: Order) -> Any:
        found, headers = await self._posted(url, body, order)
        self._certifier.check_head(order, headers)
        return found

    async def _posted(
        self, url: str, body: dict[str, Any], order: Order
    ) -> tuple[Any, dict[str, str]]:
        """The JSON and the headers of an answer."""
        async with posting(url, body, keyed(order), TIMEOUT_S) as posted:
            content = await posted.body()
        if posted.status != 200:
            raise Failed(f"{posted.status}: {content[:300].decode(errors='replace')}")
        return msgspec.json.decode(content), posted.headers

    async def _events(self, url: str, body: dict[str, Any], order: Order, answer: Answer) -> Any:
        """A stream's JSON events; their arrivals are noted."""
        async with posting(url, body, keyed(order), TIMEOUT_S) as posted:
            if posted.status != 200:
                content = await posted.body()
                raise Failed(f"{posted.status}: {content[:300].decode(errors='replace')}")
            self._certifier.check_head(order, posted.headers)
            last = answer.started
            async for at, data in posted.events():
                if data == b"[DONE]":
                    continue
                answer.pauses.append((last, at))
                last = at
                event = msgspec.json.decode(data)
                if "error" in event:
                    raise Failed(data[:300].decode(errors="replace"))
                yield event


class Failed(Exception):
    """An error that a client was told."""


def keyed(order: Order) -> dict[str, str]:
    return {"Idempotency-Key": order.key}


def lorax(order: Order) -> dict[str, Any]:
    parameters: dict[str, Any] = {"max_new_tokens": order.max_tokens}
    if order.adapter is not None:
        parameters["adapter_id"] = order.adapter
    return {"inputs": order.prompt, "parameters": parameters}


def openai(order: Order) -> dict[str, Any]:
    return {
        "model": order.adapter or "base",
        "prompt": order.prompt,
        "max_tokens": order.max_tokens,
        "temperature": 0,
    }
