"""What PEFT computes with another method is what loraplex computes with the converted LoRA."""

import json
from collections.abc import Iterator
from pathlib import Path

import peft
import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file

from loraplex.adapters.peft.validate import AdapterLimits
from loraplex.launcher.convert.convert import ConversionOptions, convert_folder
from loraplex.launcher.convert.methods import MethodOptions
from loraplex.launcher.convert.plan import Conversion
from loraplex.server.model.card import read_base_spec
from tests.grids import beyond, sparse
from tests.launcher.convert.methods import (
    CHANGED_BASES,
    PEFT_CONFIGS,
    disturb,
    made_by_peft,
    with_changed_base,
)
from tests.server.model.driver import Driver, Stream, generate
from tests.server.model.families.parity import GREEDY, assert_parity, prompt
from tests.server.model.hub_models import make_model, reference_logprobs, save_model
from tests.server.model.slabs import pack_folder, spec_of

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
]
FAMILIES = ["llama-biases-tied", "qwen2"]


class Base:
    def __init__(self, family: str, folder: Path) -> None:
        self.family = family
        self.model = make_model(family)
        self.folder = save_model(self.model, folder)
        self.driver = Driver(folder)

    def convert(self, source: Path, options: MethodOptions | None = None) -> Conversion:
        """Of `adapter` in the folder, to `out` beside it."""
        method = options or MethodOptions(base=self.folder)
        limits = AdapterLimits(allow_other_base=True)
        chosen = ConversionOptions(method=method)
        out = source.parent / "out"
        return convert_folder(source, out, spec_of(self.model), limits, chosen)[1]

    def check(self, oracle: PeftModel, out: Path) -> None:
        """Served beside the base, as the oracle answers."""
        layout, slab = pack_folder(out, spec_of(self.model))
        assert self.driver.load(0, layout, slab, 0).error is None
        streams = [
            Stream(self.driver, row, prompt(9 + row, row), slot=slot, sampling=GREEDY)
            for row, slot in enumerate((0, -1))
        ]
        generate(self.driver, streams, 4, 64)
        assert_parity(oracle, "default", streams[0])
        assert_parity(self.model, None, streams[1])
        for stream in streams:
            stream.free()
        ids = streams[0].tokens
        far = reference_logprobs(self.model, None, ids) - reference_logprobs(oracle, "default", ids)
        assert far.abs().max() > 0.02, "the adapter changes nothing"


@pytest.fixture(scope="module", params=beyond(1, FAMILIES))
def base(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Base]:
    made = Base(request.param, tmp_path_factory.mktemp("base"))
    yield made
    made.driver.close()


@pytest.mark.parametrize(("base", "name"), sparse(FAMILIES, [*PEFT_CONFIGS]), indirect=["base"])
def test_served_as_peft_computes(base: Base, name: str, tmp_path: Path) -> None:
    oracle = made_by_peft(name, base.family, tmp_path / "adapter")
    conversion = base.convert(tmp_path / "adapter")
    assert conversion.fit is not None
    assert conversion.fit.worst_error < 1e-5
    base.check(oracle, tmp_path / "out")


@pytest.mark.parametrize(
    ("family", "targets"),
    [("gpt2", ["attn.c_attn"]), ("llava-llama", r".*language_model.*\.v_proj")],
)
def test_of_other_modules_and_in_larger_models(
    family: str, targets: list[str] | str, tmp_path: Path
) -> None:
    """GPT-2's modules hold `[in, out]`; transformers has another class for models of images."""
    base = Base(family, tmp_path / "base")
    oracle = get_peft_model(base.model, peft.VeraConfig(r=5, target_modules=targets))
    disturb(oracle, seed=3)
    oracle.save_pretrained(tmp_path / "adapter")
    assert base.convert(tmp_path / "adapter").fit is not None
    base.model = make_model(family)
    base.check(oracle, tmp_path / "out")
    base.driver.close()


@pytest.mark.parametrize(("base", "init"), sparse(FAMILIES, [*CHANGED_BASES]), indirect=["base"])
def test_trained_on_a_changed_base(base: Base, init: str, tmp_path: Path) -> None:
    initial = tmp_path / "initial"
    oracle = with_changed_base(init, base.family, tmp_path / "adapter", initial)
    options = MethodOptions(base=base.folder, initial=initial if "niter" in init else None)
    conversion = base.convert(tmp_path / "adapter", options)
    assert conversion.fit is not None
    assert conversion.fit.ranks[-1] <= 8
    base.check(oracle, tmp_path / "out")


def test_an_alpha_that_the_config_leaves_to_peft(base: Base, tmp_path: Path) -> None:
    made_by_peft("loha_saved", base.family, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(file.read_text())
    del config["alpha"]
    file.write_text(json.dumps(config))
    base.convert(tmp_path / "adapter")
    assert_same_logits(base.family, tmp_path / "adapter", tmp_path / "out")


@pytest.mark.parametrize(
    ("base", "kind"), sparse(FAMILIES, ["LoHaConfig", "HRAConfig"]), indirect=["base"]
)
def test_a_head_is_a_module_as_any_other(base: Base, kind: str, tmp_path: Path) -> None:
    """Tied to the embedding or not; beside it PEFT saves the base's own table."""
    config = getattr(peft, kind)(target_modules=["q_proj", "lm_head"])
    model = get_peft_model(make_model(base.family), config)
    disturb(model, seed=4)
    model.save_pretrained(tmp_path / "adapter")
    convert_folder(
        tmp_path / "adapter",
        tmp_path / "out",
        read_base_spec(base.folder, ("base",)),
        AdapterLimits(allow_other_base=True),
        ConversionOptions(method=MethodOptions(base=base.folder)),
    )
    assert_same_logits(base.family, tmp_path / "adapter", tmp_path / "out")


def assert_same_logits(family: str, adapter: Path, converted: Path) -> None:
    found = []
    for folder in (adapter, converted):
        model = PeftModel.from_pretrained(make_model(family), str(folder)).train(False)
        found.append(reference_logprobs(model, "default", [5, 9, 30, 41, 2]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("base", "name"),
    sparse(FAMILIES, ["ia3", "oft", "fourierft", "loha_wide"]),
    indirect=["base"],
)
def test_the_error_is_the_one_that_is_stated(base: Base, name: str, tmp_path: Path) -> None:
    oracle = made_by_peft(name, base.family, tmp_path / "adapter")
    options = MethodOptions(rank=6, max_error=0.99, base=base.folder)
    fit = base.convert(tmp_path / "adapter", options).fit
    assert fit is not None
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    before = dict(base.model.named_parameters())
    lost, whole, errors = 0.0, 0.0, []
    for path, weight in oracle.merge_and_unload().named_parameters():
        module = path.removesuffix(".weight")
        a = tensors.get(f"base_model.model.{module}.lora_A.weight")
        if a is None:
            continue
        change = (weight - before[path]).double()
        b = tensors[f"base_model.model.{module}.lora_B.weight"]
        left_out = change - b.double() @ a.double()
        errors.append(float(left_out.norm() / change.norm()))
        lost, whole = lost + float(left_out.norm() ** 2), whole + float(change.norm() ** 2)
    assert fit.ranks == (6,)
    assert fit.worst_error > 0.01
    assert fit.worst_error == pytest.approx(max(errors), rel=1e-4)
    assert fit.overall_error == pytest.approx((lost / whole) ** 0.5, rel=1e-4)
    assert torch.isfinite(torch.tensor(errors)).all()
