"""Routers choose and weigh experts as transformers' do, to the bit, in every dtype."""

from typing import Any

import pytest
import torch
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from loraplex.server.model.families.registry import read_model
from loraplex.server.model.linear.dense import DenseLinear
from loraplex.server.model.linear.linear import ExpertsLinear, MoeWeights
from loraplex.server.model.lora.sites import Site
from loraplex.server.model.ops.products_torch import routed
from loraplex.server.model.spec.moe_spec import MoeSpec
from tests.server.model.hub_models import SIZES

EXPERTS, TOP_K = 12, 3
ROUTERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gpt-oss": (GptOssConfig, GptOssTopKRouter, {"num_local_experts": EXPERTS}),
    "mixtral": (MixtralConfig, MixtralTopKRouter, {"num_local_experts": EXPERTS}),
    "qwen3": (Qwen3MoeConfig, Qwen3MoeTopKRouter, {"num_experts": EXPERTS}),
    "qwen3, normed": (
        Qwen3MoeConfig,
        Qwen3MoeTopKRouter,
        {"num_experts": EXPERTS, "norm_topk_prob": True},
    ),
}
SITE = Site(0, 0, "router", SIZES["hidden_size"], (EXPERTS,))


def weights_of(spec: MoeSpec, router: Any) -> MoeWeights:
    nothing = ExpertsLinear(torch.empty(0, 0, 0))
    bias = getattr(router, "bias", None)
    return MoeWeights(spec, DenseLinear(router.weight, bias), nothing, nothing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROUTERS)
def test_as_transformers(name: str, dtype: torch.dtype) -> None:
    config_class, router_class, settings = ROUTERS[name]
    config = config_class(**SIZES, **settings, num_experts_per_tok=TOP_K)
    moe = read_model(config.to_dict()).layers[0].feed_forwards[0]
    assert isinstance(moe, MoeSpec)
    torch.manual_seed(1)
    router = router_class(config).to(dtype)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.normal_()
        x = torch.randn(50, SIZES["hidden_size"], dtype=dtype)
        _, expected, indices = router(x)
        chosen, shares = routed(x, weights_of(moe, router), None, SITE)
    assert shares.dtype == expected.dtype
    assert torch.equal(chosen, indices)
    assert torch.equal(shares, expected)
