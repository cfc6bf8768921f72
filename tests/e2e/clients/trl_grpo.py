"""TRL's AsyncGRPO on the demo model, through a proxy that notes each answer; writes a report.

Runs in the trainers' environment. The client is TRL's own. Only the attention of TRL's training
step is replaced: its kernel is a GPU's.
"""

import asyncio
import json
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from aiohttp import ClientSession, ClientTimeout, web
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    async_rollout_worker,
    packing,
)

LETTER = "e"
TEMPERATURE = 1.2
RESCORED = 8  # answers of each version
# How the demo model's template writes an answer.
ANSWER = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {"content": {"close_pattern": r"</s>|$", "content": "text"}},
}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_HOP = ("host", "content-length", "transfer-encoding", "connection", "keep-alive", "date", "server")


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends_q: torch.Tensor,
    ends_k: torch.Tensor,
    *_: Any,
    softmax_scale: float | None = None,
    **__: Any,
) -> torch.Tensor:
    """FlashAttention's `flash_attn_varlen_func` in plain torch: causal, aligned at the ends."""
    pieces = []
    for i in range(len(ends_q) - 1):
        q, k, v = (
            x[int(ends[i]) : int(ends[i + 1])].transpose(0, 1)
            for x, ends in ((query, ends_q), (key, ends_k), (value, ends_k))
        )
        k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], dim=0) for x in (k, v))
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        scaled = torch.nn.functional.scaled_dot_product_attention
        pieces.append(scaled(q, k, v, attn_mask=seen, scale=softmax_scale).transpose(0, 1))
    return torch.cat(pieces)


# A GPU's kernel and its speed; and vLLM, of which the worker wants to know that it is installed.
packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attend)
async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
async_rollout_worker.is_vllm_available = lambda *_, **__: True


def reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """How much of an answer is one letter."""
    texts = [completion[0]["content"] for completion in completions]
    return [text.count(LETTER) / max(1, len(text)) for text in texts]


class Scored(NamedTuple):
    """An answer, and the server's logprobs of its tokens."""

    prompt: list[int]
    tokens: list[int]
    logprobs: dict[str, Any]


class Proxy:
    """Passes requests on to a server, and notes what they asked for and got."""

    def __init__(self, server: str, kept: Path) -> None:
        """kept: where the folders of versions are copied to, as they were when they were loaded."""
        self.server, self.kept = server, kept
        self.digests: dict[str, str] = {}  # by name, as the server told when it was loaded
        self.answers: list[tuple[str, str]] = []  # model, digest
        self.scored: dict[str, list[Scored]] = {}  # by model
        self.calls: Counter[str] = Counter()
        self._ready = threading.Event()
        self.url = ""
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()
        self._ready.wait()

    async def _serve(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._pass)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with ClientSession(timeout=ClientTimeout(total=600)) as self._client:
            self._ready.set()
            await asyncio.Event().wait()

    async def _pass(self, request: web.Request) -> web.Response:
        body = await request.read()
        kept = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
        url = self.server + request.path_qs
        async with self._client.request(request.method, url, data=body, headers=kept) as answer:
            content, status, headers = await answer.read(), answer.status, answer.headers
        self.calls[f"{request.method} {request.path_qs} {status}"] += 1
        if request.path == "/v1/completions" and status == 200:
            asked, (choice,) = json.loads(body), json.loads(content)["choices"]
            self.answers.append((asked["model"], headers.get("x-loraplex-adapter-digest", "")))
            scored = Scored(asked["prompt"], choice["token_ids"], choice["logprobs"])
            self.scored.setdefault(asked["model"], []).append(scored)
        elif request.path == "/v1/load_lora_adapter" and status == 200:
            asked = json.loads(body)
            name = asked["lora_name"]
            shutil.copytree(asked["lora_path"], self.kept / name)
            async with self._client.get(f"{self.server}/v1/adapters/{name}") as told:
                self.digests[name] = (await told.json())["digest"]
        shown = {name: value for name, value in headers.items() if name.lower() not in _HOP}
        return web.Response(body=content, status=status, headers=shown)


def ratios(model: Any, answers: Sequence[Scored]) -> torch.Tensor:
    """Ratio of each token's probability by the model to that by the server."""
    found = []
    for answer in answers:
        ids = torch.tensor([answer.prompt + answer.tokens])
        with torch.no_grad():
            logits = model(ids).logits[0, len(answer.prompt) - 1 : -1] / TEMPERATURE
        own = logits.log_softmax(-1).gather(1, ids[0, len(answer.prompt) :, None])[:, 0]
        found.append((own - torch.tensor(answer.logprobs["token_logprobs"])).exp())
    return torch.cat(found)


def spread(found: list[torch.Tensor]) -> dict[str, float]:
    far = (torch.cat(found).double() - 1).abs()
    points = {"median": 0.5, "p99": 0.99, "p999": 0.999, "max": 1.0}
    return {"tokens": len(far)} | {name: float(far.quantile(q)) for name, q in points.items()}


def rescored(base: str, proxy: Proxy) -> dict[str, Any]:
    """How far ratios are from 1: by the version that each answer is of, and by the one after."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    versions = sorted(proxy.scored, key=lambda name: int(name.rpartition("v")[2]))
    own, other = [], []
    for number, name in enumerate(versions):
        wrapped = PeftModel.from_pretrained(model, proxy.kept / name)
        own.append(ratios(wrapped.eval(), proxy.scored[name][:RESCORED]))
        if number:
            other.append(ratios(wrapped, proxy.scored[versions[number - 1]][:RESCORED]))
        model = wrapped.unload()
    return {"own": spread(own), "next": spread(other)}


def train(server: str, model: str, folder: Path, seed: int, steps: int, stale: int) -> Any:
    proxy = Proxy(server, folder / "kept")
    prompts = ["Please cancel order #10442", "Where is my parcel?", "I love these aprons", "Thanks"]
    messages = [[{"role": "user", "content": text}] for text in prompts]
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = ANSWER
    trainer = AsyncGRPOTrainer(
        model=model,
        processing_class=tokenizer,
        args=AsyncGRPOConfig(
            output_dir=str(folder),
            vllm_server_base_url=proxy.url,
            seed=seed,
            max_steps=steps,
            max_staleness=stale,
            per_device_train_batch_size=16,
            num_generations=8,
            gradient_accumulation_steps=1,
            max_completion_length=16,
            temperature=TEMPERATURE,
            learning_rate=2e-3,
            token_budget=300,
            queue_maxsize=16,
            max_inflight_tasks=16,
            lr_scheduler_type="constant",
            dtype="float32",
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
        ),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": messages * 64}),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS),
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "ratio" in entry]
    return {
        "digests": proxy.digests,
        "answers": proxy.answers,
        "calls": proxy.calls,
        "ratios": rescored(model, proxy),
        "logs": logs,
    }


if __name__ == "__main__":
    server, model, folder, seed, steps, stale, out = sys.argv[1:]
    report = train(server, model, Path(folder), int(seed), int(steps), int(stale))
    Path(out).write_text(json.dumps(report))
