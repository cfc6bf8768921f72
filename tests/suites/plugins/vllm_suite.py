"""A plugin of pytest: vLLM's tests find servers of this project, and stand-ins for vLLM itself."""

import json
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import anthropic
import openai
import pytest
from server_lines import DEMO, url_of
from stand_ins import install

_VOCABULARY = 2048
_ADAPTERS = "json", "pirate", "sql"


class RemoteOpenAIServer:
    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model: str, args: list[str] | None = None, *_: Any, **__: Any) -> None:
        args = list(args or ())
        if "--served-model-name" in args:
            model = args[args.index("--served-model-name") + 1]
        options = []
        if "--lora-modules" in args:
            modules = args[args.index("--lora-modules") + 1 :]
            for module, adapter in zip(modules, _ADAPTERS, strict=False):
                if module.startswith("--"):
                    break
                if module.startswith("{"):
                    module = json.loads(module)["name"] + "="
                name = module.split("=")[0]
                options += ["--adapter", f"{name}=local:{DEMO / 'adapters' / adapter}"]
        options += _kept(args)
        self.show_hidden_metrics = False
        self.url_root = url_of(str(model), *options)
        self.host, self.port = "127.0.0.1", urlsplit(self.url_root).port

    def __enter__(self) -> "RemoteOpenAIServer":
        return self

    def __exit__(self, *_: Any) -> None: ...

    def url_for(self, *parts: str) -> str:
        return "/".join((self.url_root, *(part.strip("/") for part in parts)))

    def _client(self, kind: Any, url: str, kwargs: dict[str, Any]) -> Any:
        known = {"timeout": 600, "max_retries": 0, "base_url": url, "api_key": self.DUMMY_API_KEY}
        return kind(**(known | kwargs))

    def get_client(self, **kwargs: Any) -> Any:
        return self._client(openai.OpenAI, self.url_for("v1"), kwargs)

    def get_async_client(self, **kwargs: Any) -> Any:
        return self._client(openai.AsyncOpenAI, self.url_for("v1"), kwargs)

    def get_client_anthropic(self, **kwargs: Any) -> Any:
        return self._client(anthropic.Anthropic, self.url_root, kwargs)

    def get_async_client_anthropic(self, **kwargs: Any) -> Any:
        return self._client(anthropic.AsyncAnthropic, self.url_root, kwargs)


def _kept(args: list[str]) -> list[str]:
    """Options that have the same names here."""
    pairs = dict(zip(args, args[1:], strict=False))
    kept = ["--api-key", pairs["--api-key"]] if "--api-key" in pairs else []
    if "--max-logprobs" in pairs:
        most = pairs["--max-logprobs"]
        kept += ["--max-logprobs", str(min(int(most) % 2**32, _VOCABULARY))]
    return kept


def _hub() -> SimpleNamespace:
    """What is asked of the Hub is an adapter of the demo."""
    adapter = str(DEMO / "adapters" / _ADAPTERS[0])
    return SimpleNamespace(snapshot_download=lambda *_, **__: adapter)


def _tokenizer(*_: Any, **__: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(DEMO / "model")


install(
    *("vllm", "tests.utils", "tests.conftest", "tests.models", "tests.entrypoints.utils"),
    *("PIL", "fastapi", "mteb", "model_hosting_container_standards", "sentence_transformers"),
    *("openai_harmony", "lm_eval", "schemathesis", "torchvision", "ray"),
    RemoteOpenAIServer=RemoteOpenAIServer,
    get_tokenizer=_tokenizer,
    hf_api=_hub,
    ROCM_EXTRA_ARGS=[],
    ROCM_ENV_OVERRIDES={},
)


def pytest_configure(config: pytest.Config) -> None:
    import transformers

    transformers.AutoTokenizer.from_pretrained = _tokenizer
    config.addinivalue_line("markers", "skip_global_cleanup: vLLM's own")
