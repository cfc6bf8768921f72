"""Every quantised form that is read: a matrix packed by the form's own tool or by its description.

Each packer gives the tensors of a module by suffix, and the matrix that they stand for.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from transformers.integrations.finegrained_fp8 import Fp8Quantize
from transformers.utils.quantization_config import FineGrainedFP8Config

from tests.server.model.quantised.words import in_awq_words, in_words, less_one

Tensors = dict[str, torch.Tensor]


class Packed(NamedTuple):
    """weight: float32 `[out, in]`, what the tensors stand for."""

    tensors: Tensors
    weight: torch.Tensor


class Format(NamedTuple):
    """config: `quantization_config`. pack: a matrix `[out, in]`."""

    config: dict[str, Any]
    pack: Callable[[torch.Tensor], Packed]


# ---- FP8


class _Settings:
    """What `Fp8Quantize` asks of a quantiser."""

    def __init__(self, block: list[int] | None, scale_format: str) -> None:
        config: Any = FineGrainedFP8Config()
        config.weight_block_size, config.scale_fmt = block, scale_format
        self.quantization_config = config


def fp8(block: list[int] | None, scale_format: str = "float", **config: Any) -> Format:
    """By transformers' own quantiser, where blocks fit; it leaves others alone."""
    quantiser: Any = Fp8Quantize
    quantise = quantiser(_Settings(block, scale_format)).convert

    def pack(weight: torch.Tensor) -> Packed:
        rows, columns = block or weight.shape
        padded = torch.zeros(
            -(-len(weight) // rows) * rows, -(-weight.shape[1] // columns) * columns
        )
        padded[: len(weight), : weight.shape[1]] = weight
        found = quantise({"weight": padded})
        numbers = found["weight"][: len(weight), : weight.shape[1]].contiguous()
        scales = found["weight_scale_inv"]
        spread = scales.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        expected = numbers.float() * spread[: len(weight), : weight.shape[1]]
        return Packed({"weight": numbers, "weight_scale_inv": scales}, expected)

    size = {} if block is None else {"weight_block_size": block}
    return Format({"quant_method": "fp8", "activation_scheme": "dynamic", **size, **config}, pack)


def fp8_static(weight: torch.Tensor) -> Packed:
    """As AutoFP8 writes it: one scale of weights, one of activations."""
    scale = weight.abs().max() / 448
    numbers = (weight / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": numbers, "weight_scale": scale, "input_scale": torch.tensor(0.02)}
    return Packed(tensors, numbers.float() * scale)


def fbgemm(weight: torch.Tensor) -> Packed:
    scales = weight.abs().amax(1, keepdim=True) / 448
    numbers = (weight / scales).to(torch.float8_e4m3fn)
    tensors = {"weight": numbers, "weight_scale": scales, "input_scale_ub": torch.tensor([1200.0])}
    return Packed(tensors, numbers.float() * scales)


# ---- compressed-tensors


def compressed(layout: str, weights: dict[str, Any], activations: Any = None) -> Format:
    """By the compressor of that layout; the scales are those of each part's largest numbers."""
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=None if activations is None else QuantizationArgs(**activations),
        format=layout,
    )
    compressor: Any = BaseCompressor.load_from_registry(layout)
    assert scheme.weights is not None
    arguments = scheme.weights

    def pack(weight: torch.Tensor) -> Packed:
        scale, zero = _parameters(weight, arguments)
        state: Tensors = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        if activations is not None and not activations.get("dynamic"):
            state["input_scale"] = torch.tensor([0.02])
        tensors: Tensors = compressor.compress(state, scheme)
        expected: torch.Tensor = compressor.decompress(tensors, scheme)["weight"]
        return Packed(tensors, expected.float())

    group = scheme.model_dump(mode="json")
    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    return Format(config, pack)


def _parameters(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points in the shapes in which they are stored."""
    rows, columns = weight.shape
    shape: tuple[int, ...]
    match args.strategy:
        case "tensor":
            parts, shape = weight.reshape(1, -1), (1,)
        case "channel":
            parts, shape = weight, (rows, 1)
        case "group":
            size = args.group_size
            assert size is not None
            parts, shape = weight.reshape(-1, size), (rows, columns // size)
        case _:
            assert args.block_structure is not None
            high, wide = args.block_structure
            down, across = -(-rows // high), -(-columns // wide)
            shape = (down, across)
            padded = torch.zeros(down * high, across * wide)
            padded[:rows, :columns] = weight
            blocks = padded.view(down, high, across, wide).transpose(1, 2)
            parts = blocks.reshape(down * across, -1)
    scale, zero = calculate_qparams(parts.amin(1), parts.amax(1), args)
    return scale.view(shape), zero.view(shape)


def nvfp4(weight: torch.Tensor) -> Packed:
    """As llm-compressor writes it: groups' scales fill E4M3 by one number for the matrix."""
    pack, whole = compressed_nvfp4(weight)
    return Packed({**pack, "input_global_scale": torch.tensor([2.0])}, whole)


def compressed_nvfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    whole = 448 * 6 / weight.abs().max().view(1)
    groups = weight.view(len(weight), -1, 16).abs().amax(2)
    scale = (whole * groups / 6).to(torch.float8_e4m3fn).float()
    state: Tensors = {"weight": weight, "weight_scale": scale, "weight_global_scale": whole}
    compressor: Any = BaseCompressor.load_from_registry("nvfp4-pack-quantized")
    tensors: Tensors = compressor.compress(state, NVFP4)
    return tensors, of_codes(tensors["weight_packed"], tensors["weight_scale"].float() / whole)


def of_codes(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The compressor's own way back rounds to bfloat16."""
    rows, columns = len(codes), 2 * codes.shape[1]
    numbers: torch.Tensor = unpack_fp4_from_uint8(codes, rows, columns, torch.float32)
    return numbers * scales.repeat_interleave(columns // scales.shape[1], 1)


def modelopt_nvfp4(weight: torch.Tensor) -> Packed:
    """As ModelOpt names it: the number for the matrix multiplies."""
    found, _ = compressed_nvfp4(weight)
    codes, scales = found["weight_packed"], found["weight_scale"]
    whole = 1 / found["weight_global_scale"].view(())
    tensors = {"weight": codes, "weight_scale": scales, "weight_scale_2": whole}
    expected = of_codes(codes, scales.float() * whole)
    return Packed({**tensors, "input_scale": torch.tensor(0.5)}, expected)


def mxfp4_of(weight: torch.Tensor) -> Packed:
    groups = weight.view(len(weight), -1, 32).abs().amax(2).clamp(min=1e-6)
    scale = torch.exp2(torch.ceil(torch.log2(groups / 6)))
    compressor: Any = BaseCompressor.load_from_registry("mxfp4-pack-quantized")
    tensors: Tensors = compressor.compress({"weight": weight, "weight_scale": scale}, MXFP4)
    return Packed(tensors, of_codes(tensors["weight_packed"], scale))


def act_order(weight: torch.Tensor) -> Packed:
    """As older versions stored columns of any group: with the group of each."""
    groups = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(5)) // GROUP
    order = groups.argsort(stable=True)
    tensors, expected = FORMATS["ct-int4-group"].pack(weight[:, order])
    codes = tensors["weight_packed"].view(torch.uint8)
    numbers = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    unsorted = torch.empty_like(numbers)
    unsorted[:, order] = numbers
    matrix = torch.empty_like(expected)
    matrix[:, order] = expected
    words = {"weight_packed": in_words(unsorted, 4), "weight_g_idx": groups.to(torch.int32)}
    return Packed({**tensors, **words}, matrix)


# ---- GPTQ and AWQ


class _Codes(NamedTuple):
    """codes: `[in, out]`; zeros, scales: `[groups, out]`."""

    codes: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor

    def weight(self, groups: torch.Tensor) -> torch.Tensor:
        """groups: of each input. Exact in float32."""
        return ((self.codes - self.zeros[groups]) * self.scales[groups].float()).T.contiguous()


def _quantised(weight: torch.Tensor, bits: int, groups: torch.Tensor, symmetric: bool) -> _Codes:
    """Each group of inputs of each output by its least and largest number."""
    columns, most = weight.T, (1 << bits) - 1
    zeros, scales = [], []
    for group in range(int(groups.max()) + 1):
        part = columns[groups == group]
        if symmetric:
            scale = (part.abs().amax(0) * 2 / most).half()
            zero = torch.full_like(scale, 1 << bits - 1)
        else:
            low, high = part.amin(0).clamp(max=0), part.amax(0).clamp(min=0)
            scale = ((high - low) / most).half()
            zero = (-low / scale).round().clamp(0, most)
        zeros.append(zero.int())
        scales.append(scale)
    of_groups = _Codes(columns, torch.stack(zeros), torch.stack(scales))
    exact = columns / of_groups.scales[groups].float() + of_groups.zeros[groups]
    codes = exact.round().clamp(0, most).int()
    return of_groups._replace(codes=codes)


def gptq(
    bits: int = 4,
    group: int = 32,
    *,
    version: str = "gptq",
    symmetric: bool = True,
    desc_act: bool = False,
    **config: Any,
) -> Format:
    def pack(weight: torch.Tensor) -> Packed:
        inputs = weight.shape[1]
        groups = torch.arange(inputs) // (inputs if group == -1 else group)
        if desc_act:
            groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
        found = _quantised(weight, bits, groups, symmetric)
        zeros = in_words(found.zeros, bits)
        tensors = {
            "qweight": in_words(found.codes.T, bits).T.contiguous(),
            "qzeros": less_one(zeros, bits) if version == "gptq" else zeros,
            "scales": found.scales,
            "g_idx": groups.to(torch.int32),
            "bias": torch.zeros(len(weight), dtype=torch.float16),
        }
        return Packed(tensors, found.weight(groups))

    settings = {"bits": bits, "group_size": group, "sym": symmetric, "desc_act": desc_act}
    method = {"quant_method": "gptq", "checkpoint_format": version}
    return Format({**method, **settings, **config}, pack)


def awq(group: int) -> Format:
    def pack(weight: torch.Tensor) -> Packed:
        groups = torch.arange(weight.shape[1]) // group
        found = _quantised(weight, 4, groups, symmetric=False)
        tensors = {
            "qweight": in_awq_words(found.codes),
            "qzeros": in_awq_words(found.zeros),
            "scales": found.scales,
        }
        return Packed(tensors, found.weight(groups))

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "GEMM"}
    return Format(config, pack)


# ---- bitsandbytes


def four_bits(kind: str, *, nested: bool, storage: torch.dtype = torch.uint8) -> Format:
    def pack(weight: torch.Tensor) -> Packed:
        # Flat, as blocks lie: 0.50's kernel for CPUs misreads rows of other than whole blocks.
        import bitsandbytes.functional as bnb

        quantised, state = bnb.quantize_4bit(
            weight.flatten(), blocksize=64, quant_type=kind, compress_statistics=nested
        )
        expected = bnb.dequantize_4bit(quantised, state).view(weight.shape)
        state.shape = weight.shape
        tensors = {"weight": quantised.flatten().view(storage).unsqueeze(-1)}
        for name, tensor in state.as_dict(packed=True).items():
            tensors[f"weight.{name}"] = tensor
        return Packed(tensors, expected.float())

    config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_quant_storage": str(storage).removeprefix("torch."),
    }
    return Format(config, pack)


def rowwise(weight: torch.Tensor) -> Packed:
    """bitsandbytes' int8, as its modules save it."""
    import bitsandbytes.functional as bnb

    numbers, scales, _ = bnb.int8_vectorwise_quant(weight.half())
    expected = bnb.int8_vectorwise_dequant(numbers, scales)
    tensors = {"weight": numbers, "SCB": scales, "weight_format": torch.tensor(0).to(torch.uint8)}
    return Packed(tensors, expected.float())


GROUP = 16
INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
INT4_128 = {**INT4, "group_size": 128}
INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "channel"}
FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "channel"}
BY_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
INT_BY_TOKEN = {**BY_TOKEN, "type": "int"}
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
BLOCK = {"strategy": "block", "block_structure": [24, 40]}

NVFP4 = QuantizationScheme(
    targets=["Linear"],
    weights=QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16),
    format="nvfp4-pack-quantized",
)
MXFP4 = QuantizationScheme(
    targets=["Linear"],
    weights=QuantizationArgs(
        num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
    ),
    format="mxfp4-pack-quantized",
)


def of_scheme(scheme: QuantizationScheme) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": scheme.format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
        "ignore": ["lm_head"],
    }


# Of rows of whole groups of 32.
OF_WIDE_GROUPS = Format(of_scheme(MXFP4), mxfp4_of)
FORMATS: dict[str, Format] = {
    "fp8-block": fp8([24, 40]),
    "fp8-block-powers-of-two": fp8([16, 16], "ue8m0", scale_fmt="ue8m0"),
    "fp8-tensor": fp8(None),
    "fp8-bare": Format({"quant_algo": "FP8", "producer": {"name": "modelopt"}}, fp8_static),
    "fp8-static": Format({"quant_method": "fp8", "activation_scheme": "static"}, fp8_static),
    "fp8-channel": Format({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fbgemm),
    "ct-fp8-channel": compressed("float-quantized", FP8, BY_TOKEN),
    "ct-fp8-tensor": compressed("float-quantized", {**FP8, "strategy": "tensor"}, STATIC),
    "ct-fp8-block": compressed("float-quantized", {**FP8, **BLOCK}, BY_TOKEN),
    "ct-fp8-weights": compressed("naive-quantized", FP8),
    "ct-int8-channel": compressed("int-quantized", INT8, INT_BY_TOKEN),
    "ct-int8-tensor": compressed("int-quantized", {**INT8, "strategy": "tensor"}, INT_BY_TOKEN),
    "ct-int8-zeros": compressed("int-quantized", {**INT8, "symmetric": False}, INT_BY_TOKEN),
    "ct-int8-group": compressed(
        "int-quantized", {**INT8, "strategy": "group", "group_size": GROUP}, INT_BY_TOKEN
    ),
    "ct-int4-group": compressed("pack-quantized", INT4),
    "ct-int4-zeros": compressed("pack-quantized", {**INT4, "symmetric": False}),
    "ct-int4-channel": compressed(
        "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}
    ),
    "ct-int8-packed": compressed("pack-quantized", {**INT4, "num_bits": 8}),
    "ct-nvfp4": Format(of_scheme(NVFP4), nvfp4),
    "modelopt-nvfp4": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, modelopt_nvfp4
    ),
    "awq": awq(GROUP),
    "gptq": gptq(group=GROUP),
    "gptq-v2": gptq(group=GROUP, version="gptq_v2", symmetric=False),
    "gptq-zeros": gptq(group=GROUP, symmetric=False),
    "gptq-order": gptq(group=GROUP, desc_act=True),
    "gptq-whole": gptq(group=-1, symmetric=False),
    "gptq-8": gptq(8, GROUP, symmetric=False),
    "nf4": four_bits("nf4", nested=False),
    "nf4-nested": four_bits("nf4", nested=True),
    "nf4-bfloat16": four_bits("nf4", nested=True, storage=torch.bfloat16),
    "fp4": four_bits("fp4", nested=True),
    "int8-rowwise": Format({"quant_method": "bitsandbytes", "load_in_8bit": True}, rowwise),
}
FORMATS["ct-int4-order"] = Format(
    json.loads(
        json.dumps(FORMATS["ct-int4-group"].config).replace(
            '"actorder": null', '"actorder": "group"'
        )
    ),
    act_order,
)
