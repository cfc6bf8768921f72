"""The table of LoRA's strategies: each entry is one that the linear's consumer can finish."""

import pytest

from loraplex.launcher.known_models import served_families
from loraplex.server.model.families.registry import read_model
from loraplex.server.model.ops.cuda.lora_strategy import (
    FEW_TOKENS,
    MIXED_TOKENS,
    NONE_SUMMED,
    STRATEGIES,
    Consumers,
    Regime,
    Strategy,
    SummedSites,
    phase_of,
    regime_of,
    shares_tiles,
)

DEFERRED = {Strategy.DEFER, Strategy.DEFER_AND_SHRINK_NEXT}


@pytest.mark.parametrize("regime", Regime)
def test_every_regime_has_a_strategy_for_every_site_of_a_layer(regime: Regime) -> None:
    of_consumers = {"qkv", "o", "gate_up", "down"}
    others = {STRATEGIES[regime][role] for role in STRATEGIES[regime].keys() - of_consumers}
    assert others == {Strategy.FUSED if regime is Regime.FUSED else Strategy.IN_PLACE}


@pytest.mark.parametrize("regime", Regime)
def test_consumers_get_what_they_can_finish(regime: Regime) -> None:
    row = STRATEGIES[regime]
    assert row["o"] not in DEFERRED  # the norm adds a delta, and expands nothing
    assert row["down"] not in DEFERRED
    assert row["qkv"] is not Strategy.DEFER_AND_SHRINK_NEXT  # attention shrinks for no site


@pytest.mark.parametrize("regime", Regime)
def test_a_norm_over_all_heads_gets_the_whole_sum(regime: Regime) -> None:
    plain = Consumers().strategies(regime, 1)
    row = Consumers(sums_first=True).strategies(regime, 1)
    assert plain == STRATEGIES[regime]
    assert row["qkv"] not in DEFERRED
    assert {**row, "qkv": plain["qkv"]} == plain


@pytest.mark.parametrize("regime", Regime)
def test_one_module_for_several_parts_is_complete(regime: Regime) -> None:
    """Its consumers would take the ranks of parts that no adapter has."""
    row = Consumers(whole=frozenset({"qkv", "gate_up"})).strategies(regime, 1)
    assert {row["qkv"], row["gate_up"]} <= {Strategy.FUSED, Strategy.IN_PLACE}
    assert row["down"] is not Strategy.DELTA_OF_SHRUNK


@pytest.mark.parametrize("regime", Regime)
def test_lora_is_complete_before_devices_sum(regime: Regime) -> None:
    """Unless the consumer sums, which adds deltas too."""
    summed = SummedSites(frozenset({"qkv"}), frozenset({"o", "down"}), term_rows=8)
    few, many = (Consumers(summed=summed).strategies(regime, tokens) for tokens in (8, 9))
    complete = {Strategy.FUSED, Strategy.IN_PLACE}
    assert {many["qkv"], many["o"], many["down"], few["qkv"]} <= complete
    assert [few[kind] for kind in ("o", "down")] == [
        STRATEGIES[regime][kind] for kind in ("o", "down")
    ]


@pytest.mark.parametrize("regime", Regime)
def test_down_is_shrunk_once(regime: Regime) -> None:
    row = STRATEGIES[regime]
    by_activation = row["gate_up"] is Strategy.DEFER_AND_SHRINK_NEXT
    assert (row["down"] is Strategy.DELTA_OF_SHRUNK) == by_activation
    others = {kind: strategy for kind, strategy in row.items() if kind != "down"}
    assert Strategy.DELTA_OF_SHRUNK not in others.values()


@pytest.mark.parametrize("regime", Regime)
def test_fused_kernels_have_all_sites_or_none(regime: Regime) -> None:
    fused = [strategy is Strategy.FUSED for strategy in STRATEGIES[regime].values()]
    assert all(fused) == any(fused) == (regime is Regime.FUSED)


@pytest.mark.parametrize("regime", Regime)
def test_only_decodes_leave_attention_a_delta(regime: Regime) -> None:
    decodes = regime in (Regime.FEW_DECODES, Regime.MANY_DECODES)
    assert (STRATEGIES[regime]["qkv"] is Strategy.DELTA) == decodes


@pytest.mark.parametrize(
    ("tokens", "decodes", "captured", "regime"),
    [
        (FEW_TOKENS, True, True, Regime.FEW_DECODES),
        (FEW_TOKENS + 1, True, True, Regime.MANY_DECODES),
        (MIXED_TOKENS + 1, True, True, Regime.MANY_DECODES),
        (FEW_TOKENS, False, False, Regime.FEW_TOKENS),
        (FEW_TOKENS, False, True, Regime.FEW_TOKENS),
        (FEW_TOKENS + 1, False, True, Regime.MIXED),
        (MIXED_TOKENS, False, False, Regime.MIXED),
        (MIXED_TOKENS + 1, False, False, Regime.PREFILL),
        (MIXED_TOKENS + 1, False, True, Regime.CAPTURED_PREFILL),
    ],
)
def test_regimes_by_tokens(tokens: int, decodes: bool, captured: bool, regime: Regime) -> None:
    assert regime_of(tokens, decodes=decodes, captured=captured) is regime


@pytest.mark.parametrize(
    ("tokens", "decodes", "phase"),
    [
        (FEW_TOKENS, False, "decode"),
        (FEW_TOKENS + 1, False, "mixed"),
        (MIXED_TOKENS, True, "decode"),
        (MIXED_TOKENS + 1, True, "prefill"),
        (MIXED_TOKENS + 1, False, "prefill"),
    ],
)
def test_launch_parameters_by_tokens(tokens: int, decodes: bool, phase: str) -> None:
    assert phase_of(tokens, decodes=decodes) == phase


def test_tiles_are_shared_out_among_few_tokens_alone() -> None:
    """An activation that expands takes whole tiles: the regimes that defer gate_up have more."""
    assert shares_tiles(FEW_TOKENS)
    assert not shares_tiles(FEW_TOKENS + 1)


@pytest.mark.parametrize("family", ["starcoder2", "bert"])
def test_an_mlp_without_gate_shrinks_for_nobody(family: str) -> None:
    model = read_model(served_families()[family].config)
    consumers = Consumers.of(model, rounded_cache=False, summed=NONE_SUMMED)
    for regime in Regime:
        row = consumers.strategies(regime, 4096)
        assert row["down"] is not Strategy.DELTA_OF_SHRUNK
        assert model.is_causal or row["qkv"] is not Strategy.DEFER
