"""Bad requests and the status that each must get: (name, path, body, status)."""

from typing import Any

Case = tuple[str, str, bytes | dict[str, Any], int]

GENERATE = "/generate"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def lorax(name: str, value: Any, status: int = 422) -> Case:
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 4, name: value}}
    return (f"lorax {name}={value!r:.40}", GENERATE, body, status)


def openai(name: str, value: Any, status: int = 400, path: str = COMPLETIONS) -> Case:
    body: dict[str, Any] = {"model": "json", "max_tokens": 4}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": "hello"}]
    else:
        body["prompt"] = "hello"
    body[name] = value
    return (f"{path} {name}={value!r:.40}", path, body, status)


def chat(name: str, value: Any, status: int = 400) -> Case:
    return openai(name, value, status, CHAT)


LORAX_VALUES: list[Case] = [
    lorax("temperature", -0.1),
    lorax("temperature", "warm"),
    lorax("top_p", 0),
    lorax("top_p", 1.5),
    lorax("top_k", -3),
    lorax("top_k", 2**40),
    lorax("typical_p", 0),
    lorax("typical_p", 2),
    lorax("repetition_penalty", 0),
    lorax("repetition_penalty", -1),
    lorax("frequency_penalty", 3),
    lorax("presence_penalty", -3),
    lorax("max_new_tokens", 0),
    lorax("max_new_tokens", -1),
    lorax("max_new_tokens", 10**9),
    lorax("max_new_tokens", 1.5),
    lorax("best_of", 100),
    lorax("best_of", 2),
    lorax("seed", -1),
    lorax("seed", 2**64),
    lorax("seed", "x"),
    lorax("stop", "not a list"),
    lorax("stop", [""]),
    lorax("stop", ["x"] * 1000),
    lorax("truncate", 0),
    lorax("return_k_alternatives", 0),
    lorax("return_k_alternatives", 10**6),
    lorax("top_n_tokens", 10**6),
    lorax("watermark", True),
    lorax("merged_adapters", {"ids": ["json", "sql"], "weights": [0.5], "density": 1.0}),
    lorax("response_format", {"type": "json"}),
    (
        "lorax adapter of pbase",
        GENERATE,
        {"inputs": "x", "parameters": {"adapter_id": "a/1", "adapter_source": "pbase"}},
        422,
    ),
    lorax("adapter_source", 3),
    lorax("adapter_id", 7),
    lorax("details", "yes"),
]

ADAPTER_IDS: list[Case] = [
    lorax("adapter_id", "no-such-adapter", 404),
    lorax("adapter_id", "../../etc/passwd"),
    lorax("adapter_id", "local:../../etc", 422),
    lorax("adapter_id", "local:/etc", 403),
    lorax("adapter_id", "hub:org/name@re v"),
    lorax("adapter_id", "a/b/c/d"),
    lorax("adapter_id", "org/na\x00me"),
    lorax("adapter_id", "json\n"),
    lorax("adapter_id", "jsоn"),  # a Cyrillic o
    lorax("adapter_id", "%2e%2e/x"),
    lorax("adapter_id", "http://127.0.0.1/x"),
    lorax("adapter_id", "file:///etc/passwd"),
    lorax("adapter_id", "x" * 5000),
    lorax("adapter_id", "org\\name"),
]

OPENAI_VALUES: list[Case] = [
    openai("temperature", -1),
    openai("temperature", 1e400),
    openai("top_p", -0.1),
    openai("top_p", 1.01),
    openai("n", 0),
    openai("n", 10**6),
    openai("best_of", 0),
    openai("max_tokens", -1),
    openai("max_tokens", 10**9),
    openai("logprobs", 1000),
    openai("logprobs", -1),
    openai("stop", 5),
    openai("stop", [1]),
    openai("stop", ["y"] * 500),
    openai("logit_bias", {"999999999": 1}),
    openai("logit_bias", {"x": 1}),
    openai("logit_bias", {"1": 1000}),
    openai("stop_token_ids", [-1]),
    openai("stop_token_ids", [10**9]),
    openai("presence_penalty", 5),
    openai("frequency_penalty", "a"),
    openai("seed", "x"),
    openai("prompt", []),
    openai("prompt", [[]]),
    openai("prompt", [10**9]),
    openai("prompt", [-1]),
    openai("prompt", {"a": 1}),
    openai("prompt", "word " * 20000),
    openai("suffix", "x"),
    openai("nonsense", 1),
    openai("stream_options", {"include_usage": True}),
    openai("model", "no-such-adapter", 404),
    openai("model", 3),
    openai("min_tokens", 50),
    chat("messages", []),
    chat("messages", "hello"),
    chat("messages", [{"role": "", "content": "x"}]),
    chat("messages", [{"role": "user"}]),
    chat("messages", [{"content": "x"}]),
    chat("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": "u"}]}]),
    chat("response_format", {"type": "json"}),
    chat("top_logprobs", 5),
    chat("logprobs", 3),
    chat("max_completion_tokens", 0),
    chat("n", 99),
]

BODIES: list[Case] = [
    ("empty", GENERATE, b"", 422),
    ("not json", GENERATE, b"hello", 422),
    ("a list", GENERATE, b"[]", 422),
    ("no inputs", GENERATE, b"{}", 422),
    ("empty inputs", GENERATE, b'{"inputs": ""}', 422),
    ("inputs null", GENERATE, b'{"inputs": null}', 422),
    ("NaN", GENERATE, b'{"inputs": "x", "parameters": {"temperature": NaN}}', 422),
    ("deep", GENERATE, b'{"inputs": ' + b"[" * 10000 + b"]" * 10000 + b"}", 422),
    ("lone surrogate", GENERATE, b'{"inputs": "\\ud800"}', 422),
    ("bad utf-8", GENERATE, b'{"inputs": "\xff\xfe"}', 422),
    ("byte order mark", GENERATE, b'\xef\xbb\xbf{"inputs": ', 422),
    ("truncated", COMPLETIONS, b'{"model": "json", "prompt": "x"', 400),
    ("empty openai", COMPLETIONS, b"", 400),
    ("no model", CHAT, b'{"messages": []}', 400),
    ("too large", COMPLETIONS, b'{"prompt": "' + b"x" * (5 << 20) + b'"}', 413),
]

CASES: list[Case] = LORAX_VALUES + ADAPTER_IDS + OPENAI_VALUES + BODIES
