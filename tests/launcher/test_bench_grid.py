"""The offline benchmarks run the real engine; here on a tiny model and the CPU."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch

from loraplex.adapters.grammar.compile import compile_grammar
from loraplex.adapters.grammar.limits import GrammarLimits
from loraplex.adapters.grammar.vocabulary import make_vocabulary
from loraplex.launcher.__main__ import main
from loraplex.launcher.bench.engine import grid as grids
from loraplex.launcher.bench.engine.grid import (
    COPY_BYTES,
    MATRIX,
    Grid,
    adapter_bytes,
    copy_bandwidth,
    endless_json,
    engine_for,
    matrix_parameters,
    matrix_rate,
    step_bytes,
)
from loraplex.launcher.bench.engine.offline import (
    SHIPPED,
    EngineSizes,
    Load,
    MadeForm,
    OfflineEngine,
    lora_layout,
    model_folder,
    shared_base,
    tokenizer_json,
)
from loraplex.launcher.known_models import served_families
from loraplex.server.engine.executor import Masks
from loraplex.server.engine.messages import StepOutput
from loraplex.server.model.checkpoint.checkpoint import read_config
from loraplex.server.model.families.registry import read_model
from loraplex.server.model.sampling.results import StepTicket
from tests.grids import beyond

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 512,
}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    config = json.loads((SHIPPED / "llama-3.1-8b" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **TINY}))
    return tmp_path


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    main(
        ["bench", *arguments, "--dummy-weights", "--device", "cpu", "--dtype", "float32", "--json"]
    )
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def refusal(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    """The output where nothing is measured."""
    with pytest.raises(SystemExit) as left:
        bench(capsys, *arguments)
    assert left.value.code == code
    told = capsys.readouterr()
    assert not told.out
    return told.err


def test_decode(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--batch", "1,3", "--adapters", "0,2", "--rank", "4,8", "--prompt-tokens", "9")
    points = bench(capsys, "decode", "--config", str(tiny), *options, "--output-tokens", "24")
    assert [(p["B"], p["D"], p["r"]) for p in points] == [
        (1, 0, 0),
        (3, 0, 0),
        (3, 2, 4),
        (3, 2, 8),
    ]
    assert all(p["floor_ms"] >= 0 for p in points)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sampling", beyond(1, ['{"temperature": 0.8, "top_p": 0.95}', "{}"]))
def test_decode_with_schemas(tiny: Path, capsys: pytest.CaptureFixture[str], sampling: str) -> None:
    (tiny / "config.json").write_text(json.dumps({**read_json(tiny), "vocab_size": 600}))
    options = ("--batch", "1,3", "--adapters", "0", "--prompt-tokens", "9", "--output-tokens", "18")
    held = ("--constrained", "0,1,3", "--sampling", sampling)
    points = bench(capsys, "decode", "--config", str(tiny), *options, *held)
    assert [(p["B"], p["C"]) for p in points] == [(1, 0), (1, 1), (3, 0), (3, 1), (3, 3)]
    for point in points:
        assert 0 < point["median_ms"] <= point["p90_ms"]
        assert (point["masks_ms"] > 0) == (point["schema_ms"] > 0) == (point["C"] > 0)


def read_json(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def test_rows_write_what_their_grammars_let_through(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tiny / "config.json").write_text(json.dumps({**read_json(tiny), "vocab_size": 600}))
    sizes = EngineSizes(0, 1, 64, 3, 3, 6, 256)
    rng, asked = Random(0), list[int]()
    grammars = endless_json(rng), endless_json(rng)
    written: dict[int, list[int]] = {}
    with closing(OfflineEngine(tiny, sizes.config(tiny, "cpu", "float32"), None)) as engine:
        constrain = engine.executor.constrain

        def noted(ticket: StepTicket, masks: Masks) -> None:
            asked.append(len(masks.slices))
            constrain(ticket, masks)

        def keep(output: StepOutput) -> None:
            for key, event in ((e.key, e.event) for e in output.events):
                written.setdefault(key, []).extend(event.token_ids)

        monkeypatch.setattr(engine.executor, "constrain", noted)
        engine.run(Load(3, 0, 1, 5, 20, grammars=grammars), keep)
        constrained = sum(asked)
        assert constrained >= 40, "a draw whose mask is late is asked again"
        engine.run(Load(3, 0, 1, 5, 4))
        assert sum(asked) == constrained
    assert [len(written[key]) for key in range(3)] == [20] * 3
    vocabulary = make_vocabulary(tokenizer_json(600, (2,)), 600, (2,))
    for key, grammar in enumerate(grammars):
        matcher = compile_grammar(vocabulary, grammar, GrammarLimits())
        assert matcher.try_consume_tokens(written[key]) == 20


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--constrained", "64"], "no --batch is as large as one of --constrained"),
        (["--output-tokens", "16"], "--output-tokens must be more than 16"),
        (["--batch", "0"], "--batch: expected a whole number of at least 1, got '0'"),
        (["--batch", "x,1"], "--batch: expected a whole number of at least 1, got 'x'"),
        (["--batch", "2", "--adapters", "4"], "no --batch is as large as one of --adapters"),
        (["--prompt-tokens", "0"], "--prompt-tokens: expected a whole number"),
        (["--rank", "9999"], "--rank: expected a whole number from 1 to 256, got '9999'"),
        (["--sampling", "{"], "--sampling: "),
        (["--sampling", "[]"], "--sampling: Expected `object`"),
        (["--sampling", '{"temperature": "hot"}'], "--sampling: Expected `float`"),
        (["--sampling", '{"heat": 1}'], "--sampling: heat: not known"),
        (["--sampling", '{"temperature": -1}'], "--sampling: temperature: expected 0.0 to"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    tiny: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert words in refusal(capsys, 2, "decode", "--config", str(tiny), *options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt-tokens", "600"], "600 tokens of prompt and 144 of output are more than the"),
        (["--config", "/nowhere"], "/nowhere has no config.json"),
    ],
)
def test_what_the_model_cannot_do_is_one_line(
    tiny: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    told = refusal(capsys, 1, "decode", "--config", str(tiny), *options)
    assert words in told
    assert len(told.splitlines()) == 1


def test_a_broken_configuration(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tiny / "config.json").write_text("{")
    told = refusal(capsys, 1, "prefill", "--config", str(tiny))
    assert told.startswith(f"loraplex: {tiny}/config.json: cannot be read as JSON")
    assert len(told.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    "words",
    [
        ("decode", "--dummy-weights"),
        ("prefill", "--dummy-weights"),
    ],
)
def test_without_a_gpu(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", *words, "--config", "llama-3.1-8b"])
    assert left.value.code == 1
    told = capsys.readouterr().err
    assert told == "loraplex: there is no CUDA device here: --device cpu needs none\n"


def test_a_prompt_and_its_answer_may_fill_the_context(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ("--prompt-tokens", "494", "--output-tokens", "18")
    options = ("--batch", "1", "--adapters", "0", *lengths)
    (point,) = bench(capsys, "decode", "--config", str(tiny), *options)
    assert point["B"] == 1


@pytest.mark.parametrize(
    ("options", "most", "step_tokens"),
    [((), 8192, 80), (("--step-tokens", "20"), 20, 20)],
)
def test_prefill(
    tiny: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    most: int,
    step_tokens: int,
) -> None:
    built: list[int] = []

    def noted(grid: Grid) -> OfflineEngine:
        engine = engine_for(grid)
        built.append(engine.executor.limits.max_step_tokens)
        return engine

    monkeypatch.setattr(grids, "engine_for", noted)
    load = ("--batch", "2", "--adapters", "0,1", "--rank", "4", "--prompt-tokens", "40")
    points = bench(capsys, "prefill", "--config", str(tiny), *load, *options)
    assert built == [most]
    assert [(p["B"], p["D"], p["r"]) for p in points] == [(2, 0, 0), (2, 1, 4)]
    for point in points:
        tokens = point["tokens_per_s"] * point["step_ms"] / 1e3
        assert tokens == pytest.approx(step_tokens, rel=0.01)
    words = ("--output-tokens", "9")
    assert "unrecognized" in refusal(capsys, 2, "prefill", "--config", str(tiny), *words)


def test_rates_of_a_cpu_are_quick_to_measure() -> None:
    """A GPU's sizes would take minutes and gigabytes."""
    assert max(COPY_BYTES["cpu"], 2 * MATRIX["cpu"] ** 3) <= 64 << 20
    assert matrix_rate("cpu", torch.float32) > 0
    assert copy_bandwidth("cpu") > 0


def test_more_adapters_than_a_server_has_slots(tiny: Path) -> None:
    grid = Grid(tiny, "cpu", "float32", (300,), (300,), (1,), 1, 24, 512)
    engine = engine_for(grid)
    assert engine.executor.limits.adapter_slots == 300
    engine.close()


@pytest.mark.exhaustive
def test_sampling(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("decode", "--config", str(tiny), "--batch", "1", "--adapters", "0")
    hot = '{"temperature": 0.8, "top_p": 0.9, "logprobs": 1}'
    (point,) = bench(capsys, *options, "--output-tokens", "18", "--sampling", hot)
    assert point["B"] == 1


def test_known_models_by_name() -> None:
    """Of experts the floor has those that some token has; made-up adapters change none."""
    folder = model_folder("mixtral-8x7b")
    grid = Grid(folder, "cpu", "bfloat16", (1,), (0, 1), (16,), 128, 144, 8192)
    attention = 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024)) * 16 * 2
    assert adapter_bytes(grid, 16, 1) == attention
    of_experts = replace(grid, form=MadeForm(experts=True))
    expert = 32 * 3 * (4096 + 14336) * 16 * 2
    assert adapter_bytes(of_experts, 16, 1) == pytest.approx(attention + 2 * expert)
    assert attention + 2 * expert < adapter_bytes(of_experts, 16, 2) < attention + 4 * expert
    assert adapter_bytes(of_experts, 16, 9999) == pytest.approx(attention + 8 * expert)
    one, many = step_bytes(grid, (1, 0, 16)), step_bytes(grid, (512, 0, 16))
    experts = 32 * 8 * 3 * 4096 * 14336 * 2
    cache = 208 * (128 << 10)
    assert many - 511 * cache - one == pytest.approx(experts * 3 / 4, rel=1e-3)


def test_llama_8b_by_name() -> None:
    """The design's figures: 15.0 GB of weights, 5 MiB a rank, 128 KiB a token."""
    grid = Grid(
        model_folder("llama-3.1-8b"), "cpu", "bfloat16", (8,), (0, 8), (16,), 128, 144, 8192
    )
    assert adapter_bytes(grid, 16, 1) == 80 << 20
    base = step_bytes(grid, (8, 0, 16))
    assert base == pytest.approx(15.01e9 + 8 * 208 * (128 << 10), rel=1e-3)
    assert step_bytes(grid, (8, 8, 16)) == base + 8 * (80 << 20)


def test_a_window_bounds_what_a_layer_reads() -> None:
    """Gemma 3 12B: 40 of 48 layers see 1,024 tokens."""
    folder = model_folder("gemma-3-12b")
    short, long = (
        Grid(folder, "cpu", "bfloat16", (1,), (0,), (16,), prompt, 144, 8192)
        for prompt in (944, 10_944)
    )
    more = step_bytes(long, (1, 0, 16)) - step_bytes(short, (1, 0, 16))
    assert more == 8 * 10_000 * 2 * 8 * 256 * 2


def test_experts_that_some_rows_read() -> None:
    """Mixtral 8x7B: 2 of 8 experts for one token, nearly all for many."""
    model = read_model(served_families()["mixtral"].config)
    expert = 32 * 3 * 4096 * 14336
    attention = 32 * (2 * 4096 + 2 * 1024) * 4096
    assert matrix_parameters(model) == pytest.approx(attention + 2 * expert)
    assert matrix_parameters(model, 2) == pytest.approx(attention + 3.5 * expert)
    assert matrix_parameters(model, 256) == pytest.approx(attention + 8 * expert)


def test_made_up_adapters_are_of_the_text_part() -> None:
    model = read_model(served_families()["qwen2_5_vl"].config)
    text = msgspec.structs.replace(model, pictures=None)
    whole, alone = (lora_layout(shared_base(each, 1), "", 16, "bfloat16") for each in (model, text))
    assert whole == alone


@pytest.mark.exhaustive
def test_adapters_of_dora(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They run, and have a number more for each output."""
    base = shared_base(read_config(tiny), 1)
    plain, dora = (
        lora_layout(base, "0" * 64, 4, "float32", MadeForm(dora=dora)) for dora in (False, True)
    )
    assert all(site.vectors for site in dora.sites)
    assert not any(site.vectors for site in plain.sites)
    options = ("--batch", "3", "--adapters", "2", "--rank", "4", "--prompt-tokens", "9", "--dora")
    (point,) = bench(capsys, "decode", "--config", str(tiny), *options, "--output-tokens", "24")
    assert (point["B"], point["D"], point["r"]) == (3, 2, 4)


def test_decode_with_drafts(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--batch", "3", "--adapters", "0,2", "--rank", "4", "--prompt-tokens", "9")
    drafts = ("--draft", "0,2,4", "--output-tokens", "24")
    points = bench(capsys, "decode", "--config", str(tiny), *options, *drafts)
    shown = [(3, 0), (3, 2)]
    assert [(p["B"], p["D"], p["draft"]) for p in points] == [
        (*point, draft) for point in shown for draft in (0, 2, 4)
    ]
    assert all(p["median_ms"] > 0 for p in points), "each kind of step was met"


@pytest.mark.exhaustive
def test_decode_with_an_own_head(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--batch", "3", "--adapters", "0,3", "--rank", "4", "--prompt-tokens", "9")
    points = bench(
        capsys,
        "decode",
        "--config",
        str(tiny),
        *options,
        "--output-tokens",
        "18",
        "--own-heads",
        "1",
    )
    assert [(p["B"], p["D"]) for p in points] == [(3, 0), (3, 3)]
    base = shared_base(read_config(tiny), 1)
    with_head = lora_layout(base, "0" * 64, 4, "float32", MadeForm(own_heads=1))
    assert [site.role for site in with_head.sites if site.table_offset >= 0] == ["lm_head"]
