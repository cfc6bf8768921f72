"""Keys and values of eight bits: as transformers with these rounded so, in half the room."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.llama import modeling_llama

from loraplex.server.config import ConfigError
from loraplex.server.model import start
from loraplex.server.model.checkpoint.checkpoint import CheckpointError, read_config
from loraplex.server.model.ops.memory import executor_limits
from loraplex.server.model.weights import KvScales, load_weights
from tests.kernels.batches import interpreted
from tests.server.model.adapter_zoo import ZOO, with_zoo
from tests.server.model.driver import Driver, Stream, engine_config, generate
from tests.server.model.families.parity import GREEDY, assert_parity, prompt
from tests.server.model.families.variants import SEVEN
from tests.server.model.gpu_pair import assert_same, small_pair
from tests.server.model.hub_models import make_model, save_model
from tests.server.model.slabs import pack

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    # Infinity is meant.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning"),
]
CPU = torch.device("cpu")


class WholeScales(NamedTuple):
    """Stands for int8's, which come from the numbers."""

    k: None = None
    v: None = None


Scales = Sequence[KvScales | WholeScales]


def rounded(x: torch.Tensor, scale: float | None) -> torch.Tensor:
    """x: `[..., head_dim]`. scale: of FP8; None = int8, by the largest number of a head."""
    if scale is None:
        scales = x.abs().amax(-1, keepdim=True) / 127
        return (x / scales).round() * scales
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale


@contextmanager
def rounding(
    model: Any, scales: Scales, patch: pytest.MonkeyPatch, nudge: float = 0.0
) -> Iterator[None]:
    """transformers' Llama with each layer's keys, behind their rotation, and values rounded. nudge:
    moves what lies between two numbers to the other side, as another order of sums may."""
    rotate, layers = modeling_llama.apply_rotary_pos_emb, iter(scales)
    size = model.config.head_dim

    def turned(q: torch.Tensor, k: torch.Tensor, *context: Any, **options: Any) -> Any:
        q, k = rotate(q, k, *context, **options)
        return q, rounded(k * (1 + nudge), next(layers).k)

    def begin(*_: Any) -> None:
        nonlocal layers
        layers = iter(scales)

    patch.setattr(modeling_llama, "apply_rotary_pos_emb", turned)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    hooks = [inner.model.register_forward_pre_hook(begin)]
    for layer, scale in zip(inner.model.layers, scales, strict=True):
        round_values = lambda _m, _i, y, s=scale.v: rounded(  # noqa: E731
            y.unflatten(-1, (-1, size)) * (1 + nudge), s
        ).flatten(-2)
        hooks.append(layer.self_attn.v_proj.register_forward_hook(round_values))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def with_scales(folder: Path, scales: list[KvScales], names: tuple[str, str]) -> None:
    tensors = load_file(folder / "model.safetensors")
    for number, scale in enumerate(scales):
        for name, value in zip(names, scale, strict=True):
            tensors[f"model.layers.{number}.self_attn.{name}"] = torch.tensor([value])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


SCALES = [KvScales(0.03, 0.01), KvScales(0.05, 0.02), KvScales(0.04, 0.015)]


@pytest.mark.parametrize(
    "scales", [[KvScales()] * 3, SCALES, [WholeScales()] * 3], ids=["none", "stored", "int8"]
)
def test_as_transformers_with_rounded_keys_and_values(scales: Scales, tmp_path: Path) -> None:
    base = make_model("llama2")
    save_model(base, tmp_path)
    if scales is SCALES:
        with_scales(tmp_path, scales, ("k_scale", "v_scale"))
    zoo = {"rank16": ZOO["rank16"](SEVEN)}
    kv_dtype = "int8" if isinstance(scales[0], WholeScales) else "fp8"
    oracle, driver = with_zoo(base, zoo), Driver(tmp_path, kv_dtype=kv_dtype)
    layout, slab = pack(oracle, "rank16")
    assert driver.load(0, layout, slab, 0).error is None
    streams = [
        Stream(driver, row, prompt(4 + 9 * row, row), slot=row - 1, sampling=GREEDY)
        for row in range(2)
    ]
    generate(driver, streams, 6, 5)
    for name, stream in zip((None, "rank16"), streams, strict=True):
        found = (is_near(oracle, name, stream, scales, nudge) for nudge in (0.0, 1e-6, -1e-6))
        assert any(found), name
    driver.close()


def is_near(oracle: Any, name: str | None, stream: Stream, scales: Scales, nudge: float) -> bool:
    with (
        pytest.MonkeyPatch.context() as patch,
        rounding(oracle, scales, patch, nudge),
        suppress(AssertionError),
    ):
        assert_parity(oracle, name, stream)
        return True
    return False


@pytest.mark.parametrize(
    "names",
    [
        ("k_scale", "v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
def test_scales_are_found_under_their_names(names: tuple[str, str], tmp_path: Path) -> None:
    save_model(make_model("llama2"), tmp_path)
    with_scales(tmp_path, SCALES, names)
    weights = load_weights(tmp_path, read_config(tmp_path), torch.float32, CPU)
    for layer, scale in zip(weights.layers, SCALES, strict=True):
        assert layer.attention.kv_scales == pytest.approx(scale)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_is_a_positive_number(value: float, tmp_path: Path) -> None:
    save_model(make_model("llama2"), tmp_path)
    with_scales(tmp_path, [KvScales(1.0, value)] * 3, ("k_scale", "v_scale"))
    with pytest.raises(CheckpointError, match=r"self_attn\.v_scale must be a positive number"):
        load_weights(tmp_path, read_config(tmp_path), torch.float32, CPU)


def test_half_the_bytes_are_twice_the_pages(tmp_path: Path) -> None:
    folder = save_model(make_model("llama2"), tmp_path)
    plain = engine_config(folder, dtype="bfloat16")
    auto, fp8, int8 = (
        executor_limits(
            read_config(folder), msgspec.structs.replace(plain, kv_dtype=kv_dtype)
        ).num_pages
        for kv_dtype in ("auto", "fp8", "int8")
    )
    assert fp8 == 2 * auto
    assert auto < int8 < fp8


def test_a_gpu_that_does_not_convert_fp8_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--kv-dtype fp8 needs .* 8\.9, this one has 8\.0"):
        start._require_fp8((8, 0))
    start._require_fp8((8, 9))


@interpreted
@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [
        pytest.param("llama2", "fp8", marks=pytest.mark.exhaustive),
        ("llama2", "int8"),
        pytest.param("gemma2", "fp8", marks=pytest.mark.exhaustive),
        pytest.param("gemma2", "int8", marks=pytest.mark.exhaustive),
        pytest.param("gemma4-inputs", "fp8", marks=pytest.mark.exhaustive),
        pytest.param("gemma4-inputs", "int8", marks=pytest.mark.exhaustive),
    ],
)
def test_by_the_kernels(
    name: str, kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In graphs and in steps with prompts, with adapters and without, as the reference."""
    small: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "head_dim": 16}
    if name == "gemma4-inputs":  # of which a layer reads another one's keys
        small |= {"layer_types": ["full_attention"] * 2, "global_head_dim": 32}
    zoo = {each: ZOO[each](SEVEN) for each in ("rank16", "rank3_rslora")}
    model = make_model(name, **small)
    with small_pair(model, zoo, tmp_path, monkeypatch, kv_dtype=kv_dtype) as pair:
        # A key or value that is as near to two numbers may be either.
        assert_same(pair, [0, -1, 1, 1], abs=0.05)
