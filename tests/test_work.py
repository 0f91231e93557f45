"""Multiply-accumulates per token, against the paper's table and against sums by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import (
    DeepseekV2Config,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

import moesaic
from moesaic.conversion.options import Scope, make_budget
from moesaic.conversion.plan import Plan, make_plan
from moesaic.errors import MoesaicError
from moesaic.evaluate import work
from moesaic.evaluate.work import Macs, count_macs, meta_model
from moesaic.layout import Layout
from tests.families import tiny_model, tokens
from tests.mixtures import tiny_mixture

TINY: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 43,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
# Weights of matrix products in TINY.
ATTENTION, FFN, HEAD = 3 * 4 * 16 * 16, 3 * 3 * 16 * 43, 50 * 16


def llama_2_7b() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
    )


def dense(config: PreTrainedConfig, tokens: int = 1) -> Macs:
    return count_macs(meta_model(config), tokens)


def plan_of(
    config: Any, method: str, layout: str, dense_layers: tuple[int, ...] = (), **settings: Any
) -> Plan:
    chosen = moesaic.load_method(method, settings)
    scope = Scope(dense_layers=dense_layers)
    return make_plan(config, "a model", chosen, make_budget(layout), scope)


def converted(
    config: PreTrainedConfig, method: str, layout: str, tokens: int = 1, **settings: Any
) -> Macs:
    planned = plan_of(config, method, layout, **settings).config
    return count_macs(meta_model(planned), tokens)


def seen_by_loops(tokens: int, window: int | None) -> int:
    """Pairs of a query and a key it may attend to."""
    return sum(
        1
        for query in range(tokens)
        for key in range(tokens)
        if key <= query and (window is None or query - key < window)
    )


def test_llama_2_7b_at_128_tokens() -> None:
    """The dense line of the paper's Table 5."""
    macs = dense(llama_2_7b(), 128)
    assert round(macs.total / 1e9, 1) == 845.7
    assert macs.attention == 128 * 32 * 4 * 4096**2
    assert macs.ffn == 128 * 32 * 3 * 4096 * 11008
    assert macs.head == 128 * 32000 * 4096
    assert macs.router == 0
    assert macs.active_ffn_fraction == 1


def test_llama_2_7b_at_s3a3e8() -> None:
    """A quarter of the FFN less, a router of 5 experts more."""
    before, after = dense(llama_2_7b(), 128), converted(llama_2_7b(), "cmoe", "S3A3E8", 128)
    assert round(after.total / 1e9, 1) == 707.4
    assert after.ffn == before.ffn * 3 / 4
    assert after.router == 128 * 32 * 2 * 5 * 4096
    assert (after.attention, after.head) == (before.attention, before.head)
    assert after.active_ffn_fraction == 0.75


def test_the_plan_counts_one_token_before_and_after() -> None:
    plan = plan_of(LlamaConfig(**TINY), "cmoe", "S3A3E8")
    assert plan.dense_macs == dense(LlamaConfig(**TINY))
    assert plan.macs == converted(LlamaConfig(**TINY), "cmoe", "S3A3E8")


@pytest.mark.parametrize("tied", [True, False])
def test_a_tiny_model_by_hand(tied: bool) -> None:
    """The head is work whether or not it shares its weight with the embedding."""
    macs = dense(LlamaConfig(**TINY, tie_word_embeddings=tied))
    assert (macs.attention, macs.ffn, macs.router, macs.head) == (ATTENTION, FFN, 0, HEAD)
    assert macs.total == ATTENTION + FFN + HEAD


def test_a_tiny_model_s_count_is_the_sum_over_its_matrices() -> None:
    model = meta_model(LlamaConfig(**TINY))
    matrices = [
        weight.numel()
        for name, weight in model.named_parameters()
        if weight.ndim == 2 and "embed_tokens" not in name
    ]
    assert len(matrices) == 3 * 7 + 1
    assert count_macs(model, 10).total == 10 * sum(matrices)


def test_two_matrix_ffns_and_conv1d() -> None:
    config = GPT2Config(
        vocab_size=50, n_embd=16, n_layer=3, n_head=4, n_inner=43, bos_token_id=0, eos_token_id=0
    )
    macs = dense(config)
    assert (macs.attention, macs.ffn, macs.head) == (ATTENTION, 3 * 2 * 16 * 43, HEAD)


def test_everything_grows_with_the_tokens_and_scores_with_their_square() -> None:
    one, ten = dense(LlamaConfig(**TINY)), dense(LlamaConfig(**TINY), 10)
    assert ten.total == 10 * one.total
    assert (ten.attention, ten.ffn, ten.head) == (10 * ATTENTION, 10 * FFN, 10 * HEAD)
    assert ten.scores == 55 * one.scores


def test_attention_scores_stand_apart_from_the_total() -> None:
    """Queries times keys and probabilities times values: 2 * 16 a pair, 3 layers."""
    macs = dense(LlamaConfig(**TINY), 10)
    assert macs.scores == 3 * 2 * 16 * seen_by_loops(10, None)
    assert macs.total == macs.attention + macs.ffn + macs.router + macs.head


def test_keys_and_values_may_differ_in_length() -> None:
    """DeepSeek's: a key has a part with a position and one without. 3 layers of 4 heads."""
    lengths = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    config = DeepseekV2Config(**TINY, **lengths)
    assert work._scores(config, 10) == 3 * 4 * (8 + 4 + 6) * seen_by_loops(10, None)


def test_values_may_be_shorter_than_keys_that_are_one_part() -> None:
    """MiMo's: no part of a key stands apart."""
    config = LlamaConfig(**TINY, head_dim=6)
    config.v_head_dim = 4
    assert work._scores(config, 10) == 3 * 4 * (6 + 4) * seen_by_loops(10, None)


def test_grouped_queries_have_smaller_matrices_and_the_same_scores() -> None:
    grouped = dense(LlamaConfig(**TINY | {"num_key_value_heads": 1}), 10)
    assert grouped.attention == 10 * 3 * (2 * 16 * 16 + 2 * 16 * 4)
    assert grouped.scores == dense(LlamaConfig(**TINY), 10).scores


def test_heads_that_do_not_add_up_to_the_hidden_size() -> None:
    macs = dense(LlamaConfig(**TINY, head_dim=6), 10)
    assert macs.attention == 10 * 3 * 4 * 16 * 24
    assert macs.scores == 3 * 2 * 24 * seen_by_loops(10, None)


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 20])
def test_sliding_windows_by_a_loop(tokens: int) -> None:
    """Qwen2 with one full and two sliding layers; Gemma-2 alternates."""
    config = Qwen2Config(**TINY, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert config.layer_types == ["full_attention", "sliding_attention", "sliding_attention"]
    pairs = seen_by_loops(tokens, None) + 2 * seen_by_loops(tokens, 4)
    assert dense(config, tokens).scores == 2 * 16 * pairs
    gemma = Gemma2Config(**TINY, head_dim=4, sliding_window=4)
    assert gemma.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
    assert dense(gemma, tokens).scores == 2 * 16 * pairs


@pytest.mark.parametrize("tokens", [4, 20])
def test_a_window_of_all_layers_by_a_loop(tokens: int) -> None:
    """Mistral has a window and no list of layer types: it slides in every layer."""
    macs = dense(MistralConfig(**TINY, sliding_window=4), tokens)
    assert macs.scores == 3 * 2 * 16 * seen_by_loops(tokens, 4)


def test_no_window_where_the_window_is_off() -> None:
    config = Qwen2Config(**TINY, use_sliding_window=False, sliding_window=4)
    assert dense(config, 20).scores == 3 * 2 * 16 * seen_by_loops(20, None)


def test_a_tiny_mixture_by_hand() -> None:
    """43 neurons at S3A3E8: 18 shared, experts of 5, stored as 8; the router has 5 neurons.

    The padding is no work of the model's.
    """
    macs = converted(LlamaConfig(**TINY), "cmoe", "S3A3E8", 10)
    assert macs.router == 10 * 3 * 2 * 5 * 16
    assert macs.ffn == 10 * 3 * 3 * 16 * (18 + 3 * 5)
    assert (macs.attention, macs.head) == (10 * ATTENTION, 10 * HEAD)
    assert macs.scores == dense(LlamaConfig(**TINY), 10).scores
    assert macs.active_ffn_fraction == (18 + 3 * 5) / 43


def test_a_linear_router_is_one_matrix_and_thresholds_cost_nothing() -> None:
    """The experts of a token are counted as many as run on average."""
    macs = converted(LlamaConfig(**TINY), "moesaic", "S3A3E8")
    dynamic = converted(LlamaConfig(**TINY), "moesaic-dynamic", "S3A3E8", directions=0)
    assert dynamic == macs
    assert macs.router == 3 * 5 * 16
    assert macs.ffn == 3 * 3 * 16 * (18 + 3 * 5)


def test_a_quadratic_router_by_hand() -> None:
    """16 directions at most, since x has no more; 136 products of pairs beside x itself."""
    macs = converted(LlamaConfig(**TINY), "moesaic-dynamic", "S3A3E8", directions=24)
    assert macs.router == 3 * (16 * 16 + 5 * (16 + 136))
    macs = converted(LlamaConfig(**TINY), "moesaic-dynamic", "S3A3E8")
    assert macs.router == 3 * (8 * 16 + 5 * (16 + 36))


def test_repair_costs_nothing() -> None:
    plain, repaired = (
        converted(LlamaConfig(**TINY), method, "S3A3E8") for method in ("static", "static-repaired")
    )
    assert repaired == plain


def test_a_mixture_without_a_shared_expert_by_hand() -> None:
    macs = converted(LlamaConfig(**TINY | {"intermediate_size": 64}), "cmoe", "S0A2E8")
    assert macs.ffn == 3 * 3 * 16 * 2 * 8
    assert macs.router == 3 * 2 * 8 * 16
    assert macs.active_ffn_fraction == 0.25


def test_static_is_a_smaller_dense_model() -> None:
    active = Layout.parse("S3A3E8").sizes(43).active
    macs = converted(LlamaConfig(**TINY), "static", "S3A3E8")
    assert (macs.ffn, macs.router) == (3 * 3 * 16 * active, 0)
    assert macs.active_ffn_fraction == active / 43
    smaller = dense(LlamaConfig(**TINY | {"intermediate_size": active}))
    assert replace(macs, active_ffn_fraction=1) == smaller


def test_what_is_no_language_model_is_refused() -> None:
    with pytest.raises(MoesaicError, match="is no causal language model"):
        meta_model(PreTrainedConfig())


# --- mixtures ----------------------------------------------------------------------------------


def qwen3_30b_a3b() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, intermediate_size=6144, tie_word_embeddings=False,
    )  # fmt: skip


def test_qwen3_30b_a3b_at_128_tokens() -> None:
    """The paper's table: 389.3 before; 331.3 after, which leaves the routers of experts out."""
    before = dense(qwen3_30b_a3b(), 128)
    assert round(before.total / 1e9, 1) == 389.3
    assert before.ffn == 128 * 48 * 8 * 3 * 2048 * 768
    assert before.router == 128 * 48 * 128 * 2048
    assert before.attention == 128 * 48 * 2048 * (2 * 4096 + 2 * 512)
    assert before.active_ffn_fraction == 1
    after = converted(qwen3_30b_a3b(), "cmoe", "S3A3E8", 128)
    assert after.ffn == before.ffn * 3 / 4
    assert after.sub_router == 128 * 48 * 8 * 2 * 5 * 2048
    assert (after.attention, after.router, after.head) == (
        before.attention, before.router, before.head,
    )  # fmt: skip
    assert after.total - after.sub_router == pytest.approx(331.3e9, abs=0.06e9)
    assert after.active_ffn_fraction == 0.75


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "qwen2_moe", "granitemoe"])
def test_a_tiny_mixture_counts_what_a_token_multiplies(family: str) -> None:
    """Every matrix outside the experts once, the experts that run, and the head."""
    model = tiny_mixture(family)
    macs = count_macs(model, 1)
    config = model.config
    matrices = sum(
        p.numel() for n, p in model.named_parameters()
        if p.ndim == 2 and "embed_tokens" not in n and "lm_head" not in n
    )  # fmt: skip
    mixed = len(converted_layers(model))
    experts = mixed * config.num_experts_per_tok * 3 * 32 * 20
    assert macs.total == matrices + experts + 96 * 32
    assert macs.router == mixed * 4 * 32
    layers = model.model.layers
    mlp = sum(
        p.numel() for layer in layers
        for n, p in layer.named_parameters()
        if p.ndim == 2 and "attn" not in n and not n.endswith((".gate.weight", "router.weight"))
    )  # fmt: skip
    assert macs.ffn == experts + mlp


def converted_layers(model: Any) -> list[int]:
    names = ("mlp", "block_sparse_moe")
    inside = [
        next(getattr(layer, n) for n in names if hasattr(layer, n)) for layer in model.model.layers
    ]
    return [i for i, module in enumerate(inside) if hasattr(module, "experts")]


def test_a_shared_expert_and_whole_experts_are_counted() -> None:
    windows = tokens(8, 64, seed=1)
    model, report = moesaic.convert(tiny_mixture("deepseek_v3"), "cmoe", "S3A3E8", windows)
    before = count_macs(tiny_mixture("deepseek_v3"), 1)
    assert before.ffn - count_macs(model, 1).ffn == 2 * (2 + 1) * 3 * 32 * 4  # 4 of 20 skipped
    assert count_macs(model, 1).sub_router == 2 * (2 + 1) * 2 * 5 * 32
    assert report.macs == count_macs(model, 1).total
    model, report = moesaic.convert(
        tiny_mixture("deepseek_v3"), "cmoe", "S3A3E8", windows, experts=[0]
    )
    assert before.ffn - count_macs(model, 1).ffn == 2 * 2 * 3 * 32 * 4 / 4  # one expert of 4
    assert report.macs == count_macs(model, 1).total
    assert report.active_ffn_fraction == pytest.approx(0.95)


@pytest.mark.parametrize("family", ["mixtral", "glm4_moe"])
def test_an_oracle_counts_as_static_pruning_does(family: str) -> None:
    """As if to know were free: the neurons that run, in the experts and in a shared one."""
    config = tiny_mixture(family).config
    plans = [plan_of(config, method, "S1A2E5") for method in ("oracle", "static")]
    assert plans[0].macs.total == pytest.approx(plans[1].macs.total)
    assert plans[0].macs.total < plans[0].dense_macs.total


@pytest.mark.parametrize(("kept", "fraction"), [((), 0.7), ((0,), 0.8), ((0, 1), 0.9)])
def test_mixture_layers_that_stay_count_in_whole(kept: tuple[int, ...], fraction: float) -> None:
    """14 of 20 neurons run in each expert of a converted layer, all of them in the others."""
    config = tiny_mixture("qwen3_moe").config
    plan = plan_of(config, "cmoe", "S2A3E8", kept)
    assert plan.macs.ffn == pytest.approx(fraction * plan.dense_macs.ffn)
    assert plan.macs.active_ffn_fraction == pytest.approx(fraction)


def test_the_active_share_of_a_mixture_that_is_not_ours_is_not_known() -> None:
    assert work.active_ffn_fraction_of(tiny_mixture("qwen3_moe")) is None
    assert work.active_ffn_fraction_of(tiny_model("llama")) == 1


def test_linear_attention_has_no_scores() -> None:
    types = ["linear_attention", "linear_attention", "full_attention", "conv"]
    config = SimpleNamespace(
        num_attention_heads=2, head_dim=8, num_hidden_layers=4, layer_types=types
    )
    assert work._scores(config, 10) == 2 * 16 * seen_by_loops(10, None)
