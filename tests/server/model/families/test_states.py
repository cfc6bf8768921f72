"""Models whose rows have states: cut, resumed, reused rows, and what is refused of them."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from loraplex.adapters.errors import AdapterError
from loraplex.server.config import ConfigError
from loraplex.server.model.devices.sharding import shard_counts, sharded
from loraplex.server.model.families.registry import read_model
from tests.server.model.adapter_zoo import zoo_of
from tests.server.model.driver import Driver, Stream, generate, step
from tests.server.model.families.drafted import with_drafts
from tests.server.model.families.parity import GREEDY, Served, assert_parity, prompt
from tests.server.model.families.test_readers import LLAMA
from tests.server.model.families.variants import VARIANTS
from tests.server.model.hub_models import add_adapter, make_model, save_model
from tests.server.model.slabs import pack

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    # PEFT compares patterns with modules alone, though they hold for parameters too.
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
]
FOUR = ("rank1", "rank3_rslora", "rank16", "rank64_everything")
LINEAR, FULL = "linear_attention", "full_attention"
CONFIG: dict[str, Any] = {
    **LLAMA,
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "layer_types": [LINEAR, FULL],
    "partial_rotary_factor": 0.25,
}


# Rows of parity's table, of which an ordinary run tries the first.
ROWS = ("qwen3.5", "olmo-hybrid", "lfm2", "granite-h", "falcon-h1", "nemotron-h", "mamba2")


@pytest.fixture(
    scope="module",
    params=[ROWS[0], *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ROWS[1:])],
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    zoo = zoo_of(VARIANTS[request.param])
    adapters = {name: zoo[name] for name in FOUR}
    folder, made = tmp_path_factory.mktemp("base"), partial(Driver, max_draft=4)
    found = Served(request.param, folder, make_driver=made, adapters=adapters)
    yield found
    found.driver.close()


def test_odd_borders(served: Served) -> None:
    """No two sequences of a step compute as many tokens, whatever their adapters."""
    names = [None, *FOUR]
    streams = [
        Stream(served.driver, row, prompt(70, row), slot=served.slots[name], sampling=GREEDY)
        for row, name in enumerate(names)
    ]
    counts = (1, 7, 64, 3, 2, 13)
    number = 0
    while any(stream.computed < 70 for stream in streams):
        work = [
            (stream, min(counts[(number + 5 * row) % 6], 70 - stream.computed))
            for row, stream in enumerate(streams)
            if stream.computed < 70
        ]
        step(served.driver, work)
        number += 1
    generate(served.driver, streams, 4, 1)
    for name, stream in zip(names, streams, strict=True):
        assert_parity(served.oracle, name, stream)
        stream.free()


def test_a_row_of_another_sequence_and_back(served: Served) -> None:
    """A preempted sequence begins again on a row that was another's, and goes on as if alone."""
    driver, slot = served.driver, served.slots["rank3_rslora"]
    first = Stream(driver, 2, prompt(12, 1), slot=slot, sampling=GREEDY)
    generate(driver, [first], 5, 5)
    first.free()
    other = Stream(driver, 2, prompt(1, 3), sampling=GREEDY)  # its prompt is a decode's slice
    generate(driver, [other], 3, 64)
    assert_parity(served.oracle, None, other)
    other.free()
    again = Stream(driver, 2, prompt(12, 1), slot=slot, sampling=GREEDY, accepted=first.output[:3])
    generate(driver, [again], 9, 4)
    assert again.output[:5] == first.output
    assert_parity(served.oracle, "rank3_rslora", again, accepted=3)
    again.free()


def test_results_do_not_depend_on_the_cuts_or_the_batch(served: Served) -> None:
    """States move on token by token, wherever a prompt is cut."""
    found = []
    for chunk, beside in ((64, 0), (5, 0), (1, 3)):
        streams = [
            Stream(served.driver, row, prompt(9 + row, row), slot=row, sampling=GREEDY)
            for row in range(1 + beside)
        ]
        generate(served.driver, streams, 6, chunk)
        found.append((streams[0].output, [round(p.logprob or 0.0, 4) for p in streams[0].logprobs]))
        for stream in streams:
            stream.free()
    assert found[0] == found[1] == found[2]


def test_drafts_leave_no_trace_in_states(served: Served) -> None:
    for name, stream in with_drafts(served.driver, served.slots):
        assert_parity(served.oracle, name, stream)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*ROWS, "qwen3-next"])
def test_a_long_answer(name: str, tmp_path: Path) -> None:
    model = make_model(name, max_position_embeddings=4096)
    driver = Driver(save_model(model, tmp_path))
    streams = [Stream(driver, row, prompt(n, row), sampling=GREEDY) for row, n in ((0, 30), (1, 7))]
    generate(driver, streams, 2000, 16)
    for stream in streams:
        assert_parity(model, None, stream)
    driver.close()


@pytest.mark.parametrize(
    ("row", "path"),
    [
        ("qwen3.5", "linear_attn.conv1d"),
        ("lfm2", "conv.conv"),
        ("granite-h", "mamba.conv1d"),
    ],
)
def test_an_adapter_on_the_convolution_is_refused_by_name(row: str, path: str) -> None:
    """PEFT itself wants as many ranks as channels."""
    model = make_model(row)
    channels: Any = model.get_submodule(f"model.layers.0.{path}").in_channels
    config = LoraConfig(r=2, target_modules=[path, "q_proj"], rank_pattern={path: channels})
    with pytest.raises(AdapterError, match=path.rpartition(".")[2]):
        pack(add_adapter(model, "one", config, 1), "one")


LFM2: dict[str, Any] = {
    **LLAMA,
    "model_type": "lfm2",
    "architectures": ["Lfm2ForCausalLM"],
    "layer_types": ["conv", FULL],
}
NEMOTRON: dict[str, Any] = {
    **LLAMA,
    "model_type": "nemotron_h",
    "architectures": ["NemotronHForCausalLM"],
    "layers_block_type": [LINEAR, FULL],
    "num_key_value_heads": 2,
}
MAMBA2: dict[str, Any] = {
    "model_type": "mamba2",
    "architectures": ["Mamba2ForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 6,
    "head_dim": 32,
    "expand": 3,
    "n_groups": 2,
}
FALCON = {**LLAMA, "model_type": "falcon_h1", "architectures": ["FalconH1ForCausalLM"]}
BAMBA: dict[str, Any] = {
    **LLAMA,
    "model_type": "bamba",
    "architectures": ["BambaForCausalLM"],
    "attn_layer_indices": [1],
    "mamba_n_heads": 8,
}
OLMO = {**CONFIG, "model_type": "olmo_hybrid", "architectures": ["OlmoHybridForCausalLM"]}
OLMO |= {"rope_parameters": None, "partial_rotary_factor": None}
LFM2_MOE = {**LFM2, "model_type": "lfm2_moe", "architectures": ["Lfm2MoeForCausalLM"]}


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (CONFIG, {"layer_types": [LINEAR]}, "layer_types must say"),
        (CONFIG, {"layer_types": [LINEAR, "sliding_attention"]}, "layer_types must say"),
        (CONFIG, {"layer_types": [LINEAR, LINEAR]}, "without layers of full_attention"),
        (CONFIG, {"linear_num_value_heads": 33}, "33 linear_num_value_heads do not divide"),
        (CONFIG, {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be at least 2"),
        (CONFIG, {"attn_output_gate": False}, "attn_output_gate must be true"),
        (CONFIG, {"hidden_act": "gelu"}, "hidden_act must be"),
        (CONFIG, {"linear_key_head_dim": "x"}, "linear_key_head_dim must be a positive integer"),
        (OLMO, {"layer_types": [LINEAR, LINEAR]}, "without layers of full_attention"),
        (OLMO, {"linear_allow_neg_eigval": None}, "linear_allow_neg_eigval must be true or false"),
        (OLMO, {"hidden_act": "gelu"}, "hidden_act must be"),
        (LFM2, {"layer_types": ["conv", "conv"]}, "without layers of full_attention"),
        (LFM2, {"layer_types": [LINEAR, FULL]}, "layer_types must say conv or full_attention"),
        (LFM2, {"conv_L_cache": 1}, "conv_L_cache must be at least 2"),
        (LFM2, {"layer_types": None, "full_attn_idxs": 3}, "full_attn_idxs must be a list"),
        (LFM2_MOE, {"num_dense_layers": -1}, "num_dense_layers must be an integer from 0"),
        (LFM2_MOE, {"layer_types": None}, "layer_types must say conv or full_attention"),
        (MAMBA2, {"num_heads": 5}, "5 num_heads of head_dim 32 are not 192 features"),
        (MAMBA2, {"n_groups": 4}, "6 heads of Mamba do not divide among 4 groups"),
        (MAMBA2, {"time_step_limit": 1}, "time_step_limit must be two numbers"),
        (BAMBA, {"attn_layer_indices": None}, "without layers that attend"),
        (BAMBA, {"mamba_d_head": 3}, "8 mamba_n_heads of mamba_d_head 3 are not"),
        (BAMBA, {"mamba_n_groups": 3}, "8 heads of Mamba do not divide among 3 groups"),
        (BAMBA, {"mamba_d_conv": 1}, "the convolution of Mamba must have at least 2"),
        (BAMBA, {"hidden_act": "gelu"}, "hidden_act must be"),
        (BAMBA, {"time_step_limit": 3}, "time_step_limit must be two numbers"),
        (NEMOTRON, {"layers_block_type": [LINEAR, "mlp"]}, "without layers that attend"),
        (NEMOTRON, {"layers_block_type": [FULL, "conv"]}, "layers_block_type must list"),
        (NEMOTRON, {"layers_block_type": ["moe", FULL], "moe_latent_size": 0}, "moe_latent_size"),
        (NEMOTRON, {"mamba_hidden_act": "gelu"}, "mamba_hidden_act must be"),
        (FALCON, {"ssm_multipliers": [1.0]}, "ssm_multipliers must be 5 numbers"),
        (FALCON, {"mamba_proj_bias": True, "ssm_in_multiplier": 2.0}, "mamba_proj_bias beside"),
        (FALCON, {"attention_bias": True, "attention_in_multiplier": 2.0}, "attention_bias beside"),
    ],
)
def test_what_is_not_computed_is_refused(
    config: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        read_model({**config, **changes})


def test_a_pattern_of_letters_is_read() -> None:
    config = {key: value for key, value in NEMOTRON.items() if key != "layers_block_type"}
    model = read_model({**config, "hybrid_override_pattern": "M-*EM"})
    assert ([*model.states], [*model.attentions], model.num_layers) == ([0, 4], [2], 5)


def test_groups_are_repeated_where_devices_are_more() -> None:
    """Devices that repeat the one group norm together; of several each norms its own."""
    wide = {"num_attention_heads": 8, "num_key_value_heads": 8, "mamba_n_heads": 8}
    counts = {
        groups: shard_counts(read_model({**BAMBA, **wide, "mamba_n_groups": groups}))
        for groups in (1, 2, 8)
    }
    assert counts == {1: (1, 2, 4, 8), 2: (1, 2), 8: (1, 2, 4, 8)}


def test_devices_share_heads_where_no_layer_attends() -> None:
    model = read_model(MAMBA2)
    assert shard_counts(model) == (1, 2)
    with pytest.raises(ConfigError, match="the model's 6 heads or channels with states can be"):
        sharded(model, 3)


def test_every_fourth_layer_attends_where_nothing_is_said() -> None:
    config = {**CONFIG, "layer_types": None, "num_hidden_layers": 8}
    assert [*read_model(config).attentions] == [3, 7]
    assert [*read_model({**config, "full_attention_interval": 2}).attentions] == [1, 3, 5, 7]


def test_heads_of_states_are_shared_as_those_of_attention_are() -> None:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64}
    heads = {"linear_num_key_heads": 6, "linear_num_value_heads": 12}
    model = read_model({**CONFIG, **sizes, **heads})
    assert shard_counts(model) == (1, 2)
    with pytest.raises(ConfigError, match="8 heads .* and 6 heads or channels .* by 1, 2 dev"):
        sharded(model, 3)
    (window, memory), (of_two, half) = (of.states[0] for of in (model, sharded(model, 2)))
    assert (2 * of_two.shape[1], 2 * half.shape[0]) == (window.shape[1], memory.shape[0])


@pytest.mark.parametrize("form", ["of transformers", "of each", "whole"])
def test_a_convolution_in_parts(form: str, tmp_path: Path) -> None:
    """OLMo Hybrid has a tensor each for q, k and v, which transformers cuts into equal ones."""
    model: Any = make_model("olmo-hybrid")
    save_model(model, tmp_path)
    whole: dict[str, torch.Tensor] = {}
    for number in (0, 2):
        path = f"model.layers.{number}.linear_attn"
        weight = model.get_submodule(f"{path}.conv1d").weight.data
        parts = weight.split((20, 20, 72)) if form == "of each" else (weight,)
        names = [f"{of}_conv1d" for of in "qkv"] if form == "of each" else ["conv1d"]
        whole |= {f"{path}.{name}.weight": part for name, part in zip(names, parts, strict=True)}
    if form != "of transformers":
        file = tmp_path / "model.safetensors"
        rest = {name: of for name, of in load_file(file).items() if "conv1d" not in name}
        save_file({**rest, **{name: part.contiguous() for name, part in whole.items()}}, file)
    driver = Driver(tmp_path)
    stream = Stream(driver, 0, prompt(9, 1), sampling=GREEDY)
    generate(driver, [stream], 3, 4)
    assert_parity(model, None, stream)
    driver.close()


def test_a_start_says_what_rows_have(served: Served) -> None:
    executor = served.driver.executor
    (line,) = [line for line in executor.summary if line.startswith("states")]
    assert line.startswith(f"states: {executor.limits.max_rows} of ")
    assert f"and {executor.limits.num_snapshots} snapshots" in line
    assert executor.limits.has_states


def test_columns_by_key_head_are_those_of_all_heads() -> None:
    """As transformers parts the products: a head of keys has its q, k, v and z, and b and a."""
    config = {**CONFIG, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    config |= {"linear_key_head_dim": 3, "linear_value_head_dim": 2}
    by_kind = read_model(config).layers[0].branches[0]
    named = {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}
    next_config = {**config, **named, "num_experts": 0}
    by_head: Any = read_model(next_config).layers[0].branches[0]
    table = torch.arange(28).view(2, 14)
    parts = torch.split(table, [3, 3, 4, 4], dim=1)
    assert by_head.mixed_columns() == torch.cat([part.flatten() for part in parts]).tolist()
    assert by_head.gate_columns() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert by_kind.mixed_columns() == [*range(28)]  # type: ignore[union-attr]
