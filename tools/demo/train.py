"""Trains the demo's tokenizer, base model and adapters.

To run: `python -m tools.demo.train`.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from loraplex.launcher.demo import BASE_NAME, HERE
from tools.demo import feed, mix, recipe, tasks
from tools.demo.corpus import SEED, sample
from tools.demo.recipe import Schedule


@dataclass(frozen=True)
class TrainingRun:
    """Settings that all stages share."""

    out: Path
    seed: int
    device: str
    workers: int
    base: Schedule
    adapter: Schedule
    compiled: bool
    resume: bool

    @property
    def model(self) -> Path:
        """Folder of the base."""
        return self.out / "model"


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _tokenizer_texts(seed: int, count: int) -> Iterator[str]:
    rng = Random(f"train:{seed}:tokenizer")
    for _ in range(count):
        yield from (text for _, text in mix.document(rng))
        yield rng.choice(list(tasks.ANSWERS.values()))(sample(rng).facts)


def train_tokenizer(run: TrainingRun, documents: int) -> None:
    """Trains a byte-level BPE on the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(recipe.SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.VOCABULARY,
        special_tokens=list(recipe.SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_tokenizer_texts(run.seed, documents), trainer)
    bos = recipe.SPECIALS[recipe.BOS]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, recipe.BOS)]
    )
    run.model.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(run.model / "tokenizer.json"))
    _write_json(run.model / "tokenizer_config.json", recipe.TOKENIZER)


def _optimizer(weights: list[torch.nn.Parameter], rate: float) -> torch.optim.Optimizer:
    groups = [
        {"params": [w for w in weights if w.ndim > 1], "weight_decay": 0.05},
        {"params": [w for w in weights if w.ndim <= 1], "weight_decay": 0.0},
    ]
    cuda = bool(weights) and weights[0].is_cuda
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=cuda)


def _rate(plan: Schedule, step: int) -> float:
    if step < plan.warmup:
        return plan.rate * (step + 1) / plan.warmup
    done = (step - plan.warmup) / max(1, plan.steps - plan.warmup)
    return plan.rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def _loss(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
        logits = model(input_ids=tokens, use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]).float(),
        targets[:, 1:].reshape(-1),
        ignore_index=feed.IGNORED,
    )


def _fit(
    model: Any, plan: Schedule, steps: Iterator[torch.Tensor], label: str, device: str
) -> None:
    """Trains the weights that ask for it; a batch of two planes brings its own targets."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = _optimizer(weights, plan.rate)
    model.train()
    started, seen = time.monotonic(), 0
    for step in range(plan.steps):
        batch = next(steps).to(device, non_blocking=True).long()
        tokens, targets = (batch[0], batch[1]) if batch.ndim == 3 else (batch, batch)
        for group in optimizer.param_groups:
            group["lr"] = _rate(plan, step)
        loss = _loss(model, tokens, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        seen += tokens.numel()
        if step % 200 == 0 or step == plan.steps - 1:
            spent = time.monotonic() - started
            print(f"{label} {step} loss {loss.item():.4f} {seen / spent:.0f} tokens/s", flush=True)


def _save_base(run: TrainingRun, model: Any) -> None:
    state = {
        key: value.detach().to("cpu", torch.bfloat16).contiguous()
        for key, value in model.state_dict().items()
        if key != "lm_head.weight"  # Tied to the embedding.
    }
    save_file(state, str(run.model / "model.safetensors"), metadata={"format": "pt"})
    _write_json(run.model / "config.json", recipe.MODEL)
    _write_json(run.model / "generation_config.json", recipe.GENERATION)


def train_base(run: TrainingRun) -> None:
    """Trains the base: short rows first, then rows as long as the context."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(run.seed)
    model: Any
    if run.resume:
        model = LlamaForCausalLM.from_pretrained(run.model, dtype=torch.float32)
    else:
        model = LlamaForCausalLM(LlamaConfig(**{**recipe.MODEL, "torch_dtype": "float32"}))
    model.to(run.device)
    compiled = torch.compile(model) if run.compiled else model
    plan, steps = run.base, _base_batches(run)
    _fit(compiled, plan, steps, "base", run.device)
    _save_base(run, model)


def _base_batches(run: TrainingRun) -> Iterator[torch.Tensor]:
    plan, tokenizer = run.base, run.model / "tokenizer.json"
    long_steps = int(plan.steps * recipe.LONG_SHARE)
    rows = max(1, plan.rows * recipe.SHORT_ROW // recipe.CONTEXT)
    short = feed.BaseRows(tokenizer, run.seed, plan.rows, recipe.SHORT_ROW)
    stream = feed.batches(short, run.workers)
    for _ in range(plan.steps - long_steps):
        yield next(stream)
    del stream
    long = feed.BaseRows(tokenizer, run.seed, rows, recipe.CONTEXT)
    yield from feed.batches(long, run.workers)


def _lora(spec: recipe.AdapterSpec) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        target_modules=list(spec.targets),
        use_rslora=spec.rslora,
        rank_pattern=dict(spec.rank_pattern),
        alpha_pattern=dict(spec.alpha_pattern),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def train_adapter(run: TrainingRun, name: str) -> str:
    """Trains one adapter on the stored base. Returns its name."""
    from peft import get_peft_model
    from transformers import LlamaForCausalLM

    torch.manual_seed(run.seed)
    torch.set_float32_matmul_precision("high")
    spec = recipe.ADAPTERS[name]
    base: Any = LlamaForCausalLM.from_pretrained(run.model, dtype=torch.float32)
    model = get_peft_model(base.to(run.device), _lora(spec))
    if spec.start:
        _begin_with(model, run.out / "adapters" / spec.start)
    plan = spec.schedule or replace(run.adapter, rate=spec.rate)
    rows = feed.AdapterRows(run.model / "tokenizer.json", run.seed, plan, name)
    _fit(model, plan, feed.batches(rows, run.workers), name, run.device)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.to(torch.bfloat16)
    _save_adapter(model, run.out / "adapters" / name, spec)
    return name


def _begin_with(model: Any, folder: Path) -> None:
    """Gives an adapter the weights of another one of its shape."""
    from peft import set_peft_model_state_dict

    found = set_peft_model_state_dict(model, load_file(folder / "adapter_model.safetensors"))
    if found.unexpected_keys:
        raise ValueError(f"{folder}: weights of another shape: {found.unexpected_keys[:3]}")


def _save_adapter(model: Any, folder: Path, spec: recipe.AdapterSpec) -> None:
    model.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = BASE_NAME
    config["target_modules"] = sorted(config["target_modules"])
    _write_json(folder / "adapter_config.json", config)
    if spec.template:
        (folder / "chat_template.jinja").write_text(spec.template, encoding="utf-8")


def train_adapters(run: TrainingRun, names: list[str], jobs: int) -> None:
    """Trains the adapters, several at a time where the device has room.

    One that starts with another one's weights comes after it.
    """
    for late in (False, True):
        wave = [name for name in names if bool(recipe.ADAPTERS[name].start) == late]
        _train_wave(run, wave, jobs)


def _train_wave(run: TrainingRun, names: list[str], jobs: int) -> None:
    if jobs < 2:
        for name in names:
            train_adapter(run, name)
        return
    context = multiprocessing.get_context("spawn")
    share = replace(run, workers=max(1, run.workers // jobs))
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for future in [pool.submit(train_adapter, share, name) for name in names]:
            print(f"{future.result()} done", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=14, help="processes that make batches")
    parser.add_argument("--jobs", type=int, default=1, help="adapters trained at the same time")
    parser.add_argument("--eager", action="store_true", help="do not compile the base")
    parser.add_argument("--resume", action="store_true", help="go on from the stored base")
    parser.add_argument("--stages", default="tokenizer,base,adapters")
    parser.add_argument("--adapters", default=",".join(recipe.ADAPTERS))
    parser.add_argument("--documents", type=int, default=60_000, help="for the tokenizer")
    parser.add_argument("--base-steps", type=int, default=recipe.BASE.steps)
    parser.add_argument("--adapter-steps", type=int, default=recipe.ADAPTER.steps)
    return parser.parse_args()


def main() -> None:
    """Runs the stages asked for, in order."""
    args = _arguments()
    torch.set_float32_matmul_precision("high")
    run = TrainingRun(
        out=args.out,
        seed=args.seed,
        device=args.device,
        workers=args.workers,
        base=replace(recipe.BASE, steps=args.base_steps),
        adapter=replace(recipe.ADAPTER, steps=args.adapter_steps),
        compiled=args.device == "cuda" and not args.eager,
        resume=args.resume,
    )
    stages = args.stages.split(",")
    if "tokenizer" in stages:
        train_tokenizer(run, args.documents)
    if "base" in stages:
        train_base(run)
    if "adapters" in stages:
        train_adapters(run, args.adapters.split(","), args.jobs)


if __name__ == "__main__":
    main()
