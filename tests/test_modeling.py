"""The MoE block against its slow twin, and what its gates promise."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM

import moesaic
from moesaic.modeling import MoesaicBlock, MoesaicConfig, block_moesaic, can_group, config_class_for
from moesaic.modeling.projections_moesaic import MoesaicPairProjection
from tests import reference
from tests.families import CONTEXT, tiny_model, tokens


def block_of(family: str = "llama", layout: str = "S3A3E8", method: str = "cmoe") -> Any:
    model, _ = moesaic.convert(tiny_model(family), method, layout, tokens(2, CONTEXT, seed=1))
    path = model.config.moesaic.replacement_path(1)
    return model.base_model.get_submodule(path).requires_grad_(True)


def matrices(block: MoesaicBlock) -> tuple[Any, list[Any]]:
    """Shared and routed experts as plain matrices; the padding of experts is left in."""
    shared = block.shared_expert
    experts = []
    for gate_up, down in zip(block.experts.gate_up_proj, block.experts.down_proj, strict=True):
        gate, up = gate_up.chunk(2)
        experts.append((gate, up, down))
    return (shared.gate_proj.weight, shared.up_proj.weight, shared.down_proj.weight), experts


@pytest.mark.usefixtures("gathers")
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm", "moesaic"])
@pytest.mark.parametrize("count", [1, 2, 17])
def test_outputs_and_gradients_equal_the_double_loop(implementation: str, count: int) -> None:
    block = block_of("qwen3")  # no biases, which the twin does not know
    block.experts.config._experts_implementation_internal = implementation
    called = calls_of(block)
    with torch.no_grad():
        block.router.expert_scale.normal_()
        block.router.selection_bias.normal_()
    x = torch.randn(count, 32, requires_grad=True)
    probe = torch.randn(count, 32)
    (block(x) * probe).sum().backward()
    assert called == ["gathered"]
    fast = {name: p.grad.clone() for name, p in block.named_parameters()} | {"x": x.grad.clone()}
    block.zero_grad()
    twin_x = x.detach().clone().requires_grad_(True)
    index, gate = block.router(twin_x)
    shared, experts = matrices(block)
    y = reference.moe_forward(twin_x, shared, experts, index, gate, silu)
    torch.testing.assert_close(block(x), y, rtol=1e-5, atol=1e-5)
    (y * probe).sum().backward()
    slow = {name: p.grad for name, p in block.named_parameters()} | {"x": twin_x.grad}
    for name, value in fast.items():
        torch.testing.assert_close(value, slow[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("count", [1, 17])
def test_small_experts_on_a_cpu_are_computed_all_at_once(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same outputs and gradients as experts on gathered tokens."""
    block = block_of()
    called = calls_of(block)
    with torch.no_grad():
        block.router.expert_scale.normal_()
        block.router.selection_bias.normal_()
    x = torch.randn(count, 32)
    probe = torch.randn(count, 32)
    found = []
    for most in (block_moesaic.SMALL_EXPERT, 0):
        monkeypatch.setattr(block_moesaic, "SMALL_EXPERT", most)
        block.zero_grad()
        y = block(x)
        (y * probe).sum().backward()
        gradients = {name: p.grad.clone() for name, p in block.named_parameters()}
        found.append(gradients | {"y": y.detach()})
    assert called == ["all", "gathered"]
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-4, atol=1e-5, msg=name)


def calls_of(block: MoesaicBlock) -> list[str]:
    """Fills with how its experts are called: on gathered tokens, or all of them."""
    called: list[str] = []

    def note(module: Any, args: Any) -> None:
        called.append("all" if args[1] is None else "gathered")

    block.experts.register_forward_pre_hook(note)
    return called


def test_scores_are_the_representatives_hidden_activations() -> None:
    """And the representative is a member of the expert it speaks for."""
    block = block_of("qwen3")
    x = torch.randn(6, 32)
    for j, (gate, up, _) in enumerate(matrices(block)[1]):
        member = (gate == block.router.gate_proj.weight[j]).all(1).nonzero()
        assert member.numel() == 1
        expected = silu(x @ gate[member.item()]) * (x @ up[member.item()])
        torch.testing.assert_close(block.router.scores(x)[:, j], expected, rtol=1e-4, atol=1e-5)


def test_the_best_scores_run_with_gate_one() -> None:
    block = block_of()
    x = torch.randn(40, 32)
    index, gate = block.router(x)
    assert torch.equal(gate, torch.ones(40, 3))
    scores = block.router.scores(x)
    worst_chosen = scores.gather(1, index).min(1).values
    rest = scores.scatter(1, index, -torch.inf).max(1).values
    assert (worst_chosen >= rest).all()
    assert all(len(set(row)) == 3 for row in index.tolist())


def test_selection_bias_moves_the_choice_and_never_a_gate() -> None:
    block = block_of()
    x = torch.randn(200, 32)
    with torch.no_grad():
        block.router.expert_scale.normal_()
    before, gate_before = block.router(x)
    with torch.no_grad():
        block.router.selection_bias[0] = 1e6
    after, gate_after = block.router(x)
    assert (after == 0).any(1).all()
    assert not (before == 0).any(1).all()
    for token in range(200):
        old = dict(zip(before[token].tolist(), gate_before[token], strict=True))
        new = dict(zip(after[token].tolist(), gate_after[token], strict=True))
        for expert in old.keys() & new.keys():
            assert torch.equal(old[expert], new[expert])


def test_the_scale_adds_its_probability() -> None:
    block = block_of()
    x = torch.randn(10, 32)
    with torch.no_grad():
        block.router.expert_scale.copy_(torch.arange(5.0))
    index, gate = block.router(x)
    probability = block.router.scores(x).softmax(-1)
    for token in range(10):
        for slot, expert in enumerate(index[token].tolist()):
            expected = 1 + probability[token, expert] * expert
            torch.testing.assert_close(gate[token, slot], expected)


def test_cmoe_code_ranks_by_absolute_scores_of_unit_rows() -> None:
    router = block_of("qwen3", method="cmoe-code").router
    assert (router.scores(torch.randn(20, 32)) >= 0).all()
    norms = torch.cat([router.gate_proj.weight.norm(dim=1), router.up_proj.weight.norm(dim=1)])
    torch.testing.assert_close(norms, torch.ones(10))


def test_padding_neurons_are_zero_and_do_nothing() -> None:
    block = block_of()  # experts of 6, stored as 8
    assert block.experts.gate_up_proj.shape == (5, 16, 32)
    gate, up = block.experts.gate_up_proj.chunk(2, dim=1)
    for part in (gate, up):
        assert part[:, 6:].abs().max() == 0
        assert part[:, :6].abs().sum(-1).min() > 0
    assert block.experts.down_proj[:, :, 6:].abs().max() == 0


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_a_block_without_a_conversion_fills_up_with_zeros_too(family: str) -> None:
    """Else ways that leave the filling out, and train it not, compute something else."""
    config = moesaic.convert(tiny_model(family), "cmoe", "S3A3E8", tokens(2, CONTEXT))[0].config
    model = AutoModelForCausalLM.from_config(config)
    experts = model.base_model.get_submodule(config.moesaic.replacement_path(0)).experts
    rows = experts.first_matrix.unflatten(1, (-1, 8))
    assert rows[:, :, 6:].abs().max() == 0
    assert rows[:, :, :6].abs().sum(-1).min() > 0
    assert experts.down_proj[:, :, 6:].abs().max() == 0


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_exact_scores_are_exact_under_autocast_too(implementation: str) -> None:
    """In bfloat16 close experts would change places."""
    projection: Any = MoesaicPairProjection(3, 16, 5, bias=False, exact=True)
    projection.config = SimpleNamespace(_experts_implementation=implementation)
    x_PI = torch.randn(7, 16)
    expert_P = torch.tensor([2, 0, 1, 1, 2, 0, 0])
    expected = projection(x_PI, expert_P)
    with torch.autocast("cpu", torch.bfloat16):
        found = projection(x_PI, expert_P)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)


def test_double_precision_has_no_grouped_product() -> None:
    assert can_group(torch.zeros(2, 8))
    assert not can_group(torch.zeros(2, 8, dtype=torch.float64))


def test_any_leading_shape() -> None:
    block = block_of()
    x = torch.randn(2, 3, 32)
    torch.testing.assert_close(block(x), block(x.view(6, 32)).view(2, 3, 32))


def test_the_configuration_survives_pickling() -> None:
    """Engines that serve from several processes send it through pickle."""
    model, _ = moesaic.convert(tiny_model("qwen2"), "cmoe", "S3A3E8", tokens(1, CONTEXT))
    copy = pickle.loads(pickle.dumps(model.config))  # noqa: S301 - our own bytes
    assert type(copy) is type(model.config)
    assert copy.to_dict() == model.config.to_dict()


def test_a_family_keeps_its_own_configuration_class() -> None:
    from transformers import Qwen2Config

    config_class = config_class_for("qwen2")
    assert issubclass(config_class, MoesaicConfig)
    assert issubclass(config_class, Qwen2Config)
    assert config_class is config_class_for("qwen2")
    assert config_class.model_type == "moesaic"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_scale_and_bias_in_float32(dtype: torch.dtype, tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    dense = tiny_model("llama").to(dtype)
    ids = tokens(2, 32, seed=3)
    with torch.no_grad():
        expected = dense(input_ids=ids).logits.float()
    model, _ = moesaic.convert(dense, "cmoe", "S2A6E8", tokens(2, CONTEXT, seed=1))
    with torch.no_grad():
        difference = (model(input_ids=ids).logits.float() - expected).norm() / expected.norm()
    assert difference < 0.02
    model, _ = moesaic.convert(
        tiny_model("llama").to(dtype), "cmoe", "S3A3E8", tokens(2, CONTEXT, seed=1),
        output=tmp_path / "out",
    )  # fmt: skip
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    router = loaded.model.layers[0].mlp.router
    assert loaded.dtype == dtype
    assert router.up_proj.weight.dtype == dtype
    assert router.expert_scale.dtype == router.selection_bias.dtype == torch.float32
    with torch.no_grad():
        router.expert_scale += 0.01
    _, gate = router(torch.randn(4, 32, dtype=dtype))
    assert ((gate > 1) & (gate < 1.01)).all()


@pytest.mark.parametrize("method", ["cmoe", "moesaic", "moesaic-dynamic", "moesaic-neurons"])
def test_a_routers_state_is_more_than_a_weight(method: str) -> None:
    """vLLM's Transformers backend replaces a router whose only state is `weight` by its own."""
    router = block_of(method=method).router
    names = set(router.state_dict())
    assert set(router.float32_names) < names
    assert "selection_bias" in names
    assert ("expert_scale" in names) == (method != "moesaic-neurons")
    assert "weight" not in names
