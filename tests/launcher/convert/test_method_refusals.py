"""Adapters of other methods that are refused: by name, with the way out."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoHaConfig, PeftType, get_peft_model
from safetensors.torch import load_file, save_file

from loraplex.adapters.errors import AdapterError, Findings
from loraplex.adapters.peft.config import CONVERTED, parse_config, way_out
from loraplex.adapters.peft.validate import AdapterLimits
from loraplex.launcher.convert.convert import ConversionOptions, convert_folder
from loraplex.launcher.convert.formats import MlxOptions
from loraplex.launcher.convert.methods import MethodOptions, approximate, is_other_method
from tests.adapters.refusals import refusal
from tests.launcher.convert.methods import made_by_peft, with_changed_base
from tests.server.model.hub_models import make_model, save_model

pytestmark = pytest.mark.filterwarnings("ignore")
FAMILY = "qwen2"
Tensors = dict[str, torch.Tensor]
FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model(FAMILY), tmp_path_factory.mktemp("base"))


def refused(folder: Path, options: MethodOptions, mlx: MlxOptions | None = None) -> str:
    """In which words; nothing is left behind."""
    with pytest.raises(AdapterError) as error:
        convert_folder(
            folder,
            folder.parent / "out",
            None,
            AdapterLimits(allow_other_base=True),
            ConversionOptions(method=options, mlx=mlx or MlxOptions()),
        )
    assert error.value.code == "invalid"
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name]
    words = "; ".join([error.value.message, *(v.message for v in error.value.violations or ())])
    assert words.isprintable()
    return words


def change_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def put(name: str, value: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: value})


def take(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


NAN = torch.full((64, 3), float("nan"))


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("loha", put(f"{FIRST}.hada_w1_a", NAN), "NaNs detected in the merged weights"),
        ("loha", put(f"{FIRST}.hada_w1_a", torch.ones(64, 4)), r"\[64, 4\].*\[64, 3\]"),
        ("loha", put(f"{FIRST}.hada_w1_a", torch.ones(64)), r"\[64\].*\[64, 3\]"),
        (
            "loha",
            put(f"{FIRST}.hada_w1_a", torch.ones(64, 3).long()),
            "same dtype, but got: long",
        ),
        (
            "loha",
            put(f"{FIRST}.hada_w1_a", torch.full((64, 3), 1e200, dtype=torch.float64)),
            "NaNs detected in the merged weights",
        ),
        ("loha", take(f"{FIRST}.hada_w2_b"), r"hada_w2_b\.default: the tensor is missing"),
        (
            "loha",
            put(f"{FIRST}.hada_t1", torch.ones(3, 3)),
            "hada_t1' is no tensor of what",
        ),
        ("loha", put(f"{FIRST}.lora_A.weight", NAN), "no tensor of what the config targets"),
        ("loha", put("model.q_proj.weight", NAN), "no tensor of what the config targets"),
        ("lokr", put(f"{FIRST}.lokr_w1", torch.ones(1 << 16, 1 << 5)), "size mismatch"),
        ("lokr", put(f"{FIRST}.lokr_w2_b", torch.ones(5, 16)), r"\[5, 16\].*\[2, 16\]"),
        (
            "vera",
            put("base_model.vera_A", torch.ones(10, 7)),
            "size mismatch for .*vera_A",
        ),
        ("vera", put("base_model.vera_A", torch.ones(9, 112)), r"\[9, 112\].*\[10, 112\]"),
        ("vera", take("base_model.vera_A"), "they were not present"),
        ("vera", put(f"{FIRST}.vera_lambda_b", torch.ones(65)), r"\[65\].*\[64\]"),
        ("miss", put(f"{FIRST}.miss_block", torch.ones(65, 64)), "size mismatch.*miss_block"),
        ("miss_bat", put(f"{FIRST}.miss_block", torch.ones(4, 16, 8)), "size mismatch.*miss_block"),
        (
            "fourierft",
            put(f"{FIRST}.fourierft_spectrum", torch.ones(4097)),
            "mismatch.*fourierft_spectrum",
        ),
        ("oft", put(f"{FIRST}.oft_R.weight", torch.ones(8, 27)), "size mismatch.*oft_R"),
        ("oft", put(f"{FIRST}.oft_R.weight", torch.ones(7, 28)), "size mismatch.*oft_R"),
        ("boft", put(f"{FIRST}.boft_R", torch.ones(2, 8, 8, 8)), "size mismatch.*boft_R"),
        ("boft", put(f"{FIRST}.boft_R", torch.ones(1, 8, 8, 7)), "size mismatch.*boft_R"),
        ("hra", put(f"{FIRST}.hra_u", torch.zeros(64, 4)), "NaNs detected in the merged weights"),
        ("ia3", put(f"{FIRST}.ia3_l", torch.ones(63, 1)), r"\[63, 1\].*\[64, 1\]"),
        ("adalora", put(f"{FIRST}.lora_E", torch.ones(5, 1)), r"\[5, 1\].*\[6, 1\]"),
        (
            "c3a",
            put(f"{FIRST}.c3a_kernel", torch.ones(2, 4, 16)),
            r"\[2, 4, 16\].*\[4, 4, 16\]",
        ),
        (
            "vblora_topk",
            put(f"{FIRST}.vblora_logits_A_topk_indices", torch.full((3, 4, 3), 12).byte()),
            "index 12 is out of bounds",
        ),
        (
            "vblora_topk",
            put(f"{FIRST}.vblora_logits_A_topk_indices", torch.ones(3, 4).byte()),
            "the same number of dimensions",
        ),
        ("vblora", take("base_model.vblora_vector_bank"), "the tensor is missing"),
        (
            "randlora",
            put(f"{FIRST}.randlora_gamma", torch.ones(13, 63)),
            "mismatch.*randlora_gamma",
        ),
    ],
)
def test_hostile_tensors(
    base: Path, tmp_path: Path, kind: str, change: Callable[[Tensors], object], words: str
) -> None:
    made_by_peft(kind, FAMILY, tmp_path / "adapter")
    change_tensors(tmp_path / "adapter", change)
    assert_words(words, refused(tmp_path / "adapter", MethodOptions(base=base)))


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("loha", {"bias": "all"}, "bias is 'all'"),
        ("loha", {"new_maths": 3}, "unknown key 'new_maths' is set to 3"),
        ("loha", {"r": 0}, "r"),
        ("loha", {"r": 1 << 40}, "r"),
        ("loha", {"alpha": "8"}, "unsupported operand"),
        (
            "loha",
            {"target_modules": ["q_proj", "k_proj", "up_proj"]},
            "is no tensor of what the config",
        ),
        (
            "loha",
            {"target_modules": ["q_proj", "v_proj"]},
            "is no tensor of what the config",
        ),
        ("loha", {"exclude_modules": ["k_proj"]}, "is no tensor of what the config"),
        (
            "loha",
            {"target_modules": ["q_proj", "k_proj", "up_proj", "down_proj", "v_proj"]},
            r"model\.layers\.0\.self_attn\.v_proj\.hada_w1_a\.default: the tensor is missing",
        ),
        ("loha", {"r": 6}, r"\[3, 112\].*\[6, 112\]"),
        ("lokr", {"r": 3}, r"\[2, \d+\].*\[3, \d+\]"),
        ("randlora", {"r": 6}, r", 5\].*, 6\]"),
        ("adalora", {"use_dora": True}, "does not support DoRA"),
        ("adalora", {"init_r": 0}, "size mismatch|init_r"),
        ("adalora", {"lora_alpha": "9"}, "not supported between instances"),
        ("oft", {"num_cayley_neumann_terms": 1 << 30}, "num_cayley_neumann_terms"),
        ("vblora", {"topk": 13}, "selected index k out of range"),
        ("loha", {"peft_type": "LOKR"}, "is no tensor of what the config"),
        ("loha", {"peft_type": "PROMPT_TUNING"}, "train LoRA instead"),
        ("loha", {"peft_type": "XLORA"}, "train LoRA instead"),
        ("loha", {"peft_type": "HIRA"}, "peft.save_as_lora"),
        ("loha", {"peft_type": "ROAD"}, "merge_and_unload"),
        ("loha", {"peft_type": ["LOHA"]}, "PEFT writes the method's name"),
    ],
)
def test_hostile_configs(
    base: Path, tmp_path: Path, kind: str, changes: dict[str, Any], words: str
) -> None:
    made_by_peft(kind, FAMILY, tmp_path / "adapter")
    change_config(tmp_path / "adapter", **changes)
    assert_words(words, refused(tmp_path / "adapter", MethodOptions(base=base)))


def test_a_layer_without_tensors(base: Path, tmp_path: Path) -> None:
    made_by_peft("lokr", FAMILY, tmp_path / "adapter")

    def without_a_layer(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".layers.1." in name]:
            tensors.pop(name)

    change_tensors(tmp_path / "adapter", without_a_layer)
    words = refused(tmp_path / "adapter", MethodOptions(base=base))
    assert_words(r"model\.layers\.1\..*: the tensor is missing", words)


def test_patterns_are_of_the_names_of_the_trained_model(base: Path, tmp_path: Path) -> None:
    """The inner model calls its layers otherwise than the base does."""
    patterns = {"target_modules": r"layers\.\d+\..*q_proj", "exclude_modules": r"layers\.2\..*"}
    inner: Any = make_model(FAMILY)
    get_peft_model(inner.model, LoHaConfig(**patterns)).save_pretrained(tmp_path / "adapter")
    limits, options = AdapterLimits(), ConversionOptions(method=MethodOptions(base=base))
    judged, _ = convert_folder(tmp_path / "adapter", tmp_path / "out", None, limits, options)
    assert len(judged.tensors.modules) == 2
    change_config(tmp_path / "adapter", exclude_modules=None)
    shutil.rmtree(tmp_path / "out")
    words = refused(tmp_path / "adapter", MethodOptions(base=base))
    assert_words(r"layers\.2\.self_attn\.q_proj\..*: the tensor is missing", words)


def test_a_larger_error_than_is_allowed(base: Path, tmp_path: Path) -> None:
    """Both figures are stated, and both ways out."""
    made_by_peft("ia3", FAMILY, tmp_path / "adapter")
    words = refused(tmp_path / "adapter", MethodOptions(rank=6, max_error=0.01, base=base))
    assert_words(
        r"rank 6 loses 0\.\d+ of model\.layers.*and 0\.\d+ of all modules together; at most 0\.01.*"
        "--max-error.*--rank",
        words,
    )


@pytest.mark.parametrize("kind", ["ia3", "loha"])
def test_a_base_that_is_not_named(tmp_path: Path, kind: str) -> None:
    made_by_peft(kind, FAMILY, tmp_path / "adapter")
    assert_words("its base is needed: --base", refused(tmp_path / "adapter", MethodOptions()))


def test_a_quantised_base(
    base: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made_by_peft("ia3", FAMILY, tmp_path / "adapter")
    folder = save_model(make_model(FAMILY), tmp_path_factory.mktemp("quantised"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    words = refused(tmp_path / "adapter", MethodOptions(base=folder))
    assert_words("quantised; --base must name the same model in floating point", words)


def test_a_start_that_nobody_knows(base: Path, tmp_path: Path) -> None:
    initial = tmp_path.parent / f"{tmp_path.name}-initial"
    with_changed_base("pissa_niter_4", FAMILY, tmp_path / "adapter", initial)
    words = refused(tmp_path / "adapter", MethodOptions(base=base))
    assert_words("pissa_niter_4, whose start the base does not show: --initial", words)
    change_tensors(initial, put(f"{FIRST}.lora_A.weight", torch.ones(5, 64)))
    words = refused(tmp_path / "adapter", MethodOptions(base=base, initial=initial))
    assert_words(r"--initial: .*\[5, 64\].*\[4, 64\]", words)


def test_what_no_lora_is_equal_to(base: Path, tmp_path: Path) -> None:
    """An invocation leaves out tokens on which the changed base acts."""
    initial = tmp_path.parent / f"{tmp_path.name}-initial"
    with_changed_base("pissa", FAMILY, tmp_path / "adapter", initial)
    change_config(tmp_path / "adapter", alora_invocation_tokens=[5, 7])
    words = refused(tmp_path / "adapter", MethodOptions(base=base))
    assert_words("alora_invocation_tokens: the base is changed for all tokens", words)


def test_a_rank_that_is_not_the_tensors(base: Path, tmp_path: Path) -> None:
    """The factor depends on it."""
    initial = tmp_path.parent / f"{tmp_path.name}-initial"
    with_changed_base("pissa", FAMILY, tmp_path / "adapter", initial)
    change_config(tmp_path / "adapter", r=8)
    words = refused(tmp_path / "adapter", MethodOptions(base=base))
    assert_words(r"size mismatch for .*lora_B.*, 4\].*, 8\]", words)


def test_a_target_that_may_not_exist(base: Path, tmp_path: Path) -> None:
    """PEFT takes names that the base has not, among others."""
    made_by_peft("loha", FAMILY, tmp_path / "adapter")
    targets = ["q_proj", "k_proj", "down_proj", "up_proj", "c_attn"]
    change_config(tmp_path / "adapter", target_modules=targets)
    limits, options = AdapterLimits(), ConversionOptions(method=MethodOptions(base=base))
    judged, _ = convert_folder(tmp_path / "adapter", tmp_path / "out", None, limits, options)
    assert len(judged.tensors.modules) == 4 * 3


def test_options_that_have_no_part_in_it(tmp_path: Path) -> None:
    made_by_peft("loha", FAMILY, tmp_path / "adapter")
    words = refused(tmp_path / "adapter", MethodOptions(initial=tmp_path / "adapter"))
    assert_words("--initial is for LoRA", words)
    for mlx in (MlxOptions(scale=2.0), MlxOptions(base_name="org/base")):
        words = refused(tmp_path / "adapter", MethodOptions(), mlx)
        assert_words("--scale and --base-name are for mlx-lm's format", words)


def test_options_of_other_methods(tmp_path: Path) -> None:
    made_by_peft("loha", FAMILY, tmp_path / "adapter")
    change_config(tmp_path / "adapter", peft_type=None)
    assert refused(tmp_path / "adapter", MethodOptions())
    assert_words("a higher rank|no LoRA", refused(tmp_path / "adapter", MethodOptions(rank=3)))


def test_a_worker_names_the_way_out() -> None:
    for kind in PeftType:
        if kind.value != "LORA":
            (words,) = reasons({"peft_type": kind.value})["peft_type"]
            assert ("adapter convert" in words) is (kind.value in CONVERTED)
    for init in ("pissa", "olora", "pissa_niter_16", "corda", "lora_ga"):
        config = {"peft_type": "LORA", "init_lora_weights": init, "target_modules": ["q_proj"]}
        (words,) = reasons(config)["init_lora_weights"]
        assert "adapter convert" in words
        assert is_other_method(config)
    assert "adapter convert" not in way_out("LOFTQ")


@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(0, 14),
    st.integers(1, 12),
    st.sampled_from([0.0, 1e-5, 0.1, 0.5]),
    st.integers(0, 1 << 16),
)
def test_any_change_is_approximated(
    outputs: int, inputs: int, width: int, rank: int, max_error: float, seed: int
) -> None:
    """The lowest rank is taken that loses no more than is allowed, and the loss is the true one."""
    random = np.random.default_rng(seed)
    left = random.standard_normal((outputs, width)) * 10.0 ** random.integers(-4, 4, width)
    whole = left @ random.standard_normal((width, inputs))
    found = approximate(whole, rank, max_error)
    values = np.linalg.svd(whole, compute_uv=False)
    norm = float(np.linalg.norm(values))
    chosen = len(found.a)
    true_loss = float(np.linalg.norm(whole - found.b.astype(float) @ found.a))
    assert chosen <= rank
    assert found.lost == pytest.approx(true_loss, rel=1e-4, abs=1e-6 * norm)
    assert found.error <= max_error + 1e-7 or chosen == min(rank, outputs, inputs)
    if chosen > 1:
        assert np.linalg.norm(values[chosen - 1 :]) > max_error * norm * (1 - 1e-6) - 1e-7 * norm


def reasons(config: dict[str, Any]) -> dict[str, list[str]]:
    """Why a config is refused, by key."""
    findings = Findings()
    parse_config(json.dumps(config).encode(), findings)
    error = refusal(findings.raise_if_any)
    found: dict[str, list[str]] = {}
    for violation in [] if error is None else error.violations:
        found.setdefault(violation.where, []).append(violation.message)
    return found


def assert_words(pattern: str, words: str) -> None:
    assert re.search(pattern, words), words
