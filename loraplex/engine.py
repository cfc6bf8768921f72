"""loraplex inside a program: `serve` starts the command `loraplex serve` on a socket of its own."""

import asyncio
import atexit
import contextlib
import json
import logging
import os
import shutil
import signal
import tempfile
import threading
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload
from urllib.parse import quote

import httpx

from loraplex.adapters.peft.config import CONFIG_FILE
from loraplex.adapters.uploads.archive import adapter_files, archive_stream
from loraplex.launcher.config import environment
from loraplex.launcher.serving.local_worker import until_ready
from loraplex.launcher.serving.processes import Child, start_child
from loraplex.results import Chunk, Output, Vector
from loraplex.router.call import DIGEST_HEADER

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

logger = logging.getLogger("loraplex")

URL = "http://localhost"  # over the socket: the name says nothing
_MOST_AT_ONCE = 256
_LAST_LINES = 20
_STOP_S = 60.0

Prompt = str | list[int]
Prompts = list[str] | list[list[int]]
Conversation = list[dict[str, Any]]
Adapters = Sequence[str | None] | str | None
T = TypeVar("T")
R = TypeVar("R", Output, Vector)


class EngineError(Exception):
    """The engine did not start, or has ended. The message has its last words."""


class RequestFailed(EngineError):
    """A request was refused or failed. status: of HTTP. code: of the API's error, or None."""

    def __init__(self, status: int, code: str | None, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def serve(
    model: str | os.PathLike[str] | None = None,
    *,
    adapters: Mapping[str, str | os.PathLike[str]] | None = None,
    start_timeout_s: float | None = None,
    **options: Any,
) -> "Engine":
    """Start an engine, and return when it is ready.

    model: Hub id or folder; None = the demo. adapters: names, and their references as of
    `--adapter`. options: those of `loraplex serve`, with underscores; a list repeats a flag.
    Variables `LORAPLEX_…` hold as for the command. Raises EngineError.
    """
    words = [] if model is None else [os.fspath(model)]
    words += [f"--adapter={name}={os.fspath(ref)}" for name, ref in (adapters or {}).items()]
    for name, value in options.items():
        words += flags(name, value)
    return Engine(words, start_timeout_s)


def flags(name: str, value: Any) -> list[str]:
    """Words of the command line for one option. None leaves the option at its default."""
    flag = name.replace("_", "-")
    if value is None or value is False:
        return [] if value is None else [f"--no-{flag}"]
    if value is True:
        return [f"--{flag}"]
    many = value if isinstance(value, list | tuple) else (value,)
    return [f"--{flag}={item}" for item in many]


class Engine:
    """A running `loraplex serve`. Methods may be called from any thread; their twins that begin
    with `a` from any event loop.

    Prompts and conversations come alone or in lists, and results likewise. adapter: one name for
    all, or one for each; None = the base model. parameters: the fields of the OpenAI route.
    Methods raise RequestFailed for a request, EngineError once the engine has ended.
    """

    def __init__(self, words: Sequence[str], start_timeout_s: float | None = None) -> None:
        self._process = os.getpid()
        self._folder = tempfile.mkdtemp(prefix="loraplex-")
        self.socket = Path(self._folder) / "socket"
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_report)
        # The engine dies with the thread that starts it: this one lives as long as the engine.
        self._thread = threading.Thread(target=self._loop.run_forever, name="loraplex", daemon=True)
        self._thread.start()
        limits = httpx.Limits(max_connections=_MOST_AT_ONCE)
        transport = httpx.AsyncHTTPTransport(uds=os.fspath(self.socket), limits=limits)
        self._http = httpx.AsyncClient(transport=transport, base_url=URL, timeout=None)
        self._closed = False
        self._child: Child | None = None
        atexit.register(self.close)
        try:
            self._call(self._start(words, start_timeout_s))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Let running answers end as the command does, and stop the engine. Safe to repeat."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if os.getpid() != self._process:
            return
        try:
            self._call(self._stop())
        finally:
            self._call(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    @overload
    def generate(
        self, prompts: Prompt, *, adapter: str | None = None, **parameters: Any
    ) -> Output: ...

    @overload
    def generate(
        self, prompts: Prompts, *, adapter: Adapters = None, **parameters: Any
    ) -> list[Output]: ...

    def generate(
        self, prompts: Prompt | Prompts, *, adapter: Adapters = None, **parameters: Any
    ) -> Any:
        """An `Output` for a text or a list of token ids; a list of them for a list of prompts."""
        return self._call(self._generate(prompts, adapter, parameters))

    @overload
    async def agenerate(
        self, prompts: Prompt, *, adapter: str | None = None, **parameters: Any
    ) -> Output: ...

    @overload
    async def agenerate(
        self, prompts: Prompts, *, adapter: Adapters = None, **parameters: Any
    ) -> list[Output]: ...

    async def agenerate(
        self, prompts: Prompt | Prompts, *, adapter: Adapters = None, **parameters: Any
    ) -> Any:
        return await self._wait(self._generate(prompts, adapter, parameters))

    @overload
    def chat(
        self, messages: Conversation, *, adapter: str | None = None, **parameters: Any
    ) -> Output: ...

    @overload
    def chat(
        self, messages: list[Conversation], *, adapter: Adapters = None, **parameters: Any
    ) -> list[Output]: ...

    def chat(
        self,
        messages: Conversation | list[Conversation],
        *,
        adapter: Adapters = None,
        **parameters: Any,
    ) -> Any:
        """An `Output` for a list of messages; a list of them for a list of conversations."""
        return self._call(self._chat(messages, adapter, parameters))

    @overload
    async def achat(
        self, messages: Conversation, *, adapter: str | None = None, **parameters: Any
    ) -> Output: ...

    @overload
    async def achat(
        self, messages: list[Conversation], *, adapter: Adapters = None, **parameters: Any
    ) -> list[Output]: ...

    async def achat(
        self,
        messages: Conversation | list[Conversation],
        *,
        adapter: Adapters = None,
        **parameters: Any,
    ) -> Any:
        return await self._wait(self._chat(messages, adapter, parameters))

    @overload
    def embed(self, texts: Prompt, *, adapter: str | None = None, **parameters: Any) -> Vector: ...

    @overload
    def embed(
        self, texts: Prompts, *, adapter: Adapters = None, **parameters: Any
    ) -> list[Vector]: ...

    def embed(self, texts: Prompt | Prompts, *, adapter: Adapters = None, **parameters: Any) -> Any:
        """A `Vector` for a text or a list of token ids; a list of them for a list."""
        return self._call(self._embed(texts, adapter, parameters))

    @overload
    async def aembed(
        self, texts: Prompt, *, adapter: str | None = None, **parameters: Any
    ) -> Vector: ...

    @overload
    async def aembed(
        self, texts: Prompts, *, adapter: Adapters = None, **parameters: Any
    ) -> list[Vector]: ...

    async def aembed(
        self, texts: Prompt | Prompts, *, adapter: Adapters = None, **parameters: Any
    ) -> Any:
        return await self._wait(self._embed(texts, adapter, parameters))

    def load_adapter(
        self,
        name: str,
        adapter: str | os.PathLike[str] | Mapping[str, Any],
        *,
        config: Mapping[str, Any] | None = None,
        keep: int | None = None,
    ) -> str:
        """Make a name mean an adapter: the next version of it. What runs keeps the one before.

        adapter: a folder as PEFT saves one, or its tensors by name, with the config. keep: how many
        versions stay; None = as before, or 1. Returns the version's own name, such as `policy@3`.
        """
        return self._call(self._load_adapter(name, adapter, config, keep))

    async def aload_adapter(
        self,
        name: str,
        adapter: str | os.PathLike[str] | Mapping[str, Any],
        *,
        config: Mapping[str, Any] | None = None,
        keep: int | None = None,
    ) -> str:
        return await self._wait(self._load_adapter(name, adapter, config, keep))

    def stream(
        self, prompt: Prompt | Conversation, *, adapter: str | None = None, **parameters: Any
    ) -> Generator[Chunk, None, None]:
        """Parts of the answer to one prompt or conversation.

        Closing the iterator ends the request.
        """
        chunks = SimpleQueue[Chunk | None]()
        answering = self._begin(self._stream(prompt, adapter, parameters, chunks.put))
        try:
            while (chunk := chunks.get()) is not None:
                yield chunk
            answering.result()
        finally:
            answering.cancel()

    async def astream(
        self, prompt: Prompt | Conversation, *, adapter: str | None = None, **parameters: Any
    ) -> AsyncGenerator[Chunk, None]:
        chunks = asyncio.Queue[Chunk | None]()
        loop = asyncio.get_running_loop()

        def put(chunk: Chunk | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)

        answering = self._begin(self._stream(prompt, adapter, parameters, put))
        try:
            while (chunk := await chunks.get()) is not None:
                yield chunk
            await asyncio.wrap_future(answering)
        finally:
            answering.cancel()

    def openai(self) -> "OpenAI":
        """A client of the package `openai`. Models are adapters' names."""
        import openai

        transport = _httpx_of(openai).HTTPTransport(uds=os.fspath(self.socket))
        http = openai.DefaultHttpxClient(transport=transport, timeout=None)
        return openai.OpenAI(base_url=f"{URL}/v1", api_key="none", http_client=http)

    def async_openai(self) -> "AsyncOpenAI":
        """The same client for event loops."""
        import openai

        transport = _httpx_of(openai).AsyncHTTPTransport(uds=os.fspath(self.socket))
        http = openai.DefaultAsyncHttpxClient(transport=transport, timeout=None)
        return openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", http_client=http)

    # On the engine's own loop

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        is_elsewhere = os.getpid() != self._process
        if is_elsewhere or self._loop.is_closed():
            work.close()
            raise EngineError(
                f"the engine {'is of another process' if is_elsewhere else 'is closed'}"
            )
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._begin(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._begin(work))

    async def _start(self, words: Sequence[str], timeout_s: float | None) -> None:
        command = ["serve", *words, f"--uds={self.socket}"]
        self._child = start_child(command, environment({}), self._heard)
        ready = asyncio.create_task(until_ready(self._http, URL))
        gone = asyncio.create_task(self._child.exited.wait())
        waiting = {ready, gone}
        try:
            done, _ = await asyncio.wait(
                waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for task in waiting:
                task.cancel()
        if ready not in done:
            raise EngineError(self._last_words("is not ready" if gone not in done else "ended"))

    async def _stop(self) -> None:
        if self._child is not None:
            self._child.signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._child.exited.wait(), _STOP_S)

    async def _end(self) -> None:
        """Ends the engine at once, and lets what waits for an answer see that."""
        if self._child is not None:
            self._child.signal(signal.SIGKILL)
            await self._child.exited.wait()
        await self._http.aclose()
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)

    def _heard(self, line: str) -> None:
        self._lines.append(line)
        logger.info("%s", line)

    def _last_words(self, fate: str) -> str:
        return "\n".join([f"the engine {fate}", *self._lines])

    async def _generate(
        self, prompts: Prompt | Prompts, adapter: Adapters, parameters: Mapping[str, Any]
    ) -> Any:
        base = {**_free(parameters, "prompt"), **_counted(parameters), "return_token_ids": True}
        bodies, is_one = _bodies("prompt", prompts, _is_prompt, adapter, base)
        return await self._ask("/v1/completions", bodies, is_one, Output.of)

    async def _chat(
        self,
        messages: Conversation | list[Conversation],
        adapter: Adapters,
        parameters: Mapping[str, Any],
    ) -> Any:
        base = {**_free(parameters, "messages"), **_listed(parameters), "return_token_ids": True}
        bodies, is_one = _bodies("messages", messages, _is_conversation, adapter, base)
        return await self._ask("/v1/chat/completions", bodies, is_one, Output.of)

    async def _embed(
        self, texts: Prompt | Prompts, adapter: Adapters, parameters: Mapping[str, Any]
    ) -> Any:
        base = _free(parameters, "input")
        bodies, is_one = _bodies("input", texts, _is_prompt, adapter, base)
        return await self._ask("/v1/embeddings", bodies, is_one, Vector.of)

    async def _load_adapter(
        self,
        name: str,
        adapter: str | os.PathLike[str] | Mapping[str, Any],
        config: Mapping[str, Any] | None,
        keep: int | None,
    ) -> str:
        content = await _upload_of(adapter, config)
        query = {} if keep is None else {"keep": keep}
        path = f"/v1/adapters/{quote(name, safe='')}"
        try:
            answer = await self._http.put(path, content=content, params=query)
        except httpx.TransportError as error:
            raise EngineError(self._last_words(f"has lost the upload: {error}")) from error
        if answer.status_code != httpx.codes.OK:
            raise _failed(answer.status_code, answer.json())
        return f"{name}@{answer.json()['version']}"

    async def _ask(
        self,
        path: str,
        bodies: Sequence[Mapping[str, Any]],
        is_one: bool,
        read: Callable[[Mapping[str, Any], str | None], R],
    ) -> R | list[R]:
        async def one(body: Mapping[str, Any]) -> R:
            async with self._answer(path, body) as answer:
                await answer.aread()
                return read(answer.json(), answer.headers.get(DIGEST_HEADER))

        tasks = [asyncio.create_task(one(body)) for body in bodies]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return results[0] if is_one else results

    async def _stream(
        self,
        prompt: Prompt | Conversation,
        adapter: str | None,
        parameters: Mapping[str, Any],
        put: Callable[[Chunk | None], object],
    ) -> None:
        """Gives the parts of an answer to `put` as they come, and None at its end."""
        is_chat = not _is_prompt(prompt)
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        field = "messages" if is_chat else "prompt"
        try:
            logprobs = (_listed if is_chat else _counted)(parameters)
            wanted = {**_free(parameters, field), **logprobs, **_model(adapter), field: prompt}
            body = {**wanted, "stream": True, "return_token_ids": True}
            async with self._answer(path, body) as answer:
                async for line in answer.aiter_lines():
                    for chunk in _chunks(line, answer.status_code):
                        put(chunk)
        finally:
            put(None)

    @contextlib.asynccontextmanager
    async def _answer(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[httpx.Response]:
        try:
            async with self._http.stream("POST", path, json=body) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    raise _failed(answer.status_code, answer.json())
                yield answer
        except httpx.TransportError as error:
            raise EngineError(self._last_words(f"has lost the request: {error}")) from error


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Reports what fails unheard, but for a wait that `anyio` ends although it was cancelled."""
    if not isinstance(context.get("exception"), asyncio.InvalidStateError):
        loop.default_exception_handler(context)


def _chunks(line: str, status: int) -> Iterator[Chunk]:
    """The parts of an answer in a line of its stream. Raises RequestFailed."""
    if not line.startswith("data: {"):
        return
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        raise _failed(status, event)
    for chunk in map(Chunk.of, event["choices"]):
        if chunk.holds_something:
            yield chunk


def _httpx_of(openai: Any) -> Any:
    """The HTTP package of this version of `openai`: `httpx` or its successor."""
    packages = (each.__module__.partition(".")[0] for each in openai.DefaultHttpxClient.__mro__)
    return import_module(next(name for name in packages if name != openai.__name__))


def _failed(status: int, body: Mapping[str, Any]) -> RequestFailed:
    error = body["error"]
    return RequestFailed(status, error.get("code"), error["message"])


async def _upload_of(
    adapter: str | os.PathLike[str] | Mapping[str, Any], config: Mapping[str, Any] | None
) -> bytes | AsyncIterator[bytes]:
    """The body of an upload: a tar of a folder's files, or tensors with the config among them."""
    if not isinstance(adapter, Mapping):
        return archive_stream(await asyncio.to_thread(adapter_files, Path(adapter)))
    if config is None:
        raise ValueError("tensors need the `config` of their adapter, as of adapter_config.json")
    import safetensors.torch

    tensors = {name: tensor.contiguous() for name, tensor in adapter.items()}
    # PEFT's `to_dict` gives names of modules as a set, in any order.
    metadata = {CONFIG_FILE: json.dumps(dict(config), default=sorted)}
    return await asyncio.to_thread(safetensors.torch.save, tensors, metadata)


def _bodies(
    field: str,
    given: Any,
    is_one: Callable[[Any], bool],
    adapter: Adapters,
    parameters: Mapping[str, Any],
) -> tuple[list[dict[str, Any]], bool]:
    """Bodies, and whether the caller gave one thing rather than a list."""
    alone = is_one(given)
    things = [given] if alone else list(given)
    names = [adapter] * len(things) if adapter is None or isinstance(adapter, str) else adapter
    if len(names) != len(things):
        raise ValueError(f"{len(things)} prompts, but {len(names)} adapters")
    pairs = zip(things, names, strict=True)
    return [{**parameters, field: thing, **_model(name)} for thing, name in pairs], alone


def _model(adapter: str | None) -> dict[str, str]:
    return {} if adapter is None else {"model": adapter}


def _free(parameters: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """The caller's parameters. Raises ValueError for one that its method sets."""
    for name in (field, "stream", "return_token_ids", "encoding_format"):
        if name in parameters:
            raise ValueError(f"`{name}` is no parameter of this method, which sets it")
    return parameters


def _counted(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """`logprobs=True` as chats have it; completions count the alternatives."""
    asked = parameters.get("logprobs")
    return {"logprobs": 0 if asked else None} if isinstance(asked, bool) else {}


def _listed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A field that lists special tokens of chats, too: each token is named by its id."""
    return {"return_tokens_as_token_ids": True} if parameters.get("logprobs") else {}


def _is_prompt(given: Any) -> bool:
    return isinstance(given, str) or (len(given) > 0 and isinstance(given[0], int))


def _is_conversation(given: Any) -> bool:
    return len(given) > 0 and isinstance(given[0], Mapping)
