"""Perplexity: sum of the token losses over the number of predicted tokens."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from moesaic.errors import MoesaicError
from moesaic.evaluate import perplexity
from tests import reference


class Bigram(torch.nn.Module):
    """Looks the next token's logits up by the sum of the window so far, or by the last token."""

    def __init__(self, logits_VV: torch.Tensor, remembers: bool = False, family: str = "bigram"):
        super().__init__()
        self.config = PreTrainedConfig(bos_token_id=0)
        self.config.model_type = family
        self.table = torch.nn.Embedding.from_pretrained(logits_VV)
        self.remembers = remembers

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.table

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        assert not use_cache
        rows = input_ids.cumsum(1) % len(self.table.weight) if self.remembers else input_ids
        return SimpleNamespace(logits=self.table(rows))


# After 0 come 0, 1, 2 with 1/2, 1/4, 1/4; after 1 surely 2; after 2 each with 1/3.
HAND = Bigram(torch.tensor([[0.5, 0.25, 0.25], [1e-30, 1e-30, 1.0], [1 / 3, 1 / 3, 1 / 3]]).log())


GEMMA = Bigram(HAND.table.weight, family="gemma2")


def tokens(*ids: int) -> torch.Tensor:
    return torch.tensor(ids)


@pytest.mark.parametrize(
    ("ids", "length", "losses"),
    [
        ((0, 0), 2, [2]),
        ((0, 1, 2, 0), 4, [4, 1, 3]),
        ((0, 1, 2, 0), 2, [4, 3]),  # the first token of a window is not predicted
        ((0, 1, 2, 0), 100, [4, 1, 3]),  # a text shorter than a window
        ((0, 1, 2, 0, 0, 2), 4, [4, 1, 3, 4]),  # the last, short window counts
        ((0, 1, 2, 0, 0), 4, [4, 1, 3]),  # a last window of one token predicts nothing
        ((0, 1, 2, 0, 0), 3, [4, 1, 2]),
    ],
)
def test_by_hand(ids: tuple[int, ...], length: int, losses: list[int]) -> None:
    """`losses` holds the inverse probability of each predicted token."""
    value, count = perplexity(HAND, tokens(*ids), length)
    assert count == len(losses)
    assert value == pytest.approx(math.prod(losses) ** (1 / len(losses)), rel=1e-6)


@pytest.mark.parametrize(
    ("ids", "length", "losses"),
    [
        ((1, 2), 2, [4, 4]),  # 0 stands before each window of one token
        ((0, 1, 2, 0), 2, [4, 4, 2]),  # the 0 that the text begins with already is that token
        ((1, 2, 0, 0), 3, [4, 1, 2, 2]),
        ((1, 2, 0), 3, [4, 1, 2]),  # a last window of one token of the text counts
        ((1, 2, 0), 100, [4, 1, 3]),
    ],
)
def test_gemma_reads_its_first_token_before_every_window(
    ids: tuple[int, ...], length: int, losses: list[int]
) -> None:
    told: list[int] = []
    value, count = perplexity(GEMMA, tokens(*ids), length, progress=told.append)
    assert count == sum(told) == len(losses)
    assert value == pytest.approx(math.prod(losses) ** (1 / len(losses)), rel=1e-6)


def test_it_is_not_the_mean_of_window_means() -> None:
    """Window losses log 4, log 1, log 3 and log 4: the last one is not half of the result."""
    value, _ = perplexity(HAND, tokens(0, 1, 2, 0, 0, 2), 4)
    mean_of_means = math.exp((math.log(4 * 1 * 3) / 3 + math.log(4)) / 2)
    assert value == pytest.approx(48**0.25, rel=1e-6)
    assert abs(value - mean_of_means) > 0.1


@pytest.mark.parametrize("length", [2, 3, 7, 64, 99, 100, 101, 5000])
def test_equals_the_loop(length: int) -> None:
    """A model that remembers its window: what it saw before must not leak into the next."""
    model = Bigram(torch.randn(11, 11), remembers=True)
    ids = torch.randint(11, (100,))
    value, count = perplexity(model, ids, length)
    expected, predicted = reference.perplexity(model, ids, length)
    assert count == predicted
    assert value == pytest.approx(expected, rel=1e-5)


def test_equals_the_loop_across_batches() -> None:
    """More tokens than go through the model at once."""
    model, ids = Bigram(torch.randn(11, 11), remembers=True), torch.randint(11, (9001,))
    value, count = perplexity(model, ids, 500)
    expected, predicted = reference.perplexity(model, ids, 500)
    assert (count, predicted) == (8982, 8982)
    assert value == pytest.approx(expected, rel=1e-5)


def test_half_precision_logits_are_summed_in_single() -> None:
    model, ids = Bigram(torch.randn(11, 11).bfloat16()), torch.randint(11, (5000,))
    expected, _ = reference.perplexity(model, ids, 2500)
    assert perplexity(model, ids, 2500)[0] == pytest.approx(expected, rel=1e-5)


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary() -> None:
    value, _ = perplexity(Bigram(torch.zeros(11, 11)), torch.randint(11, (50,)), 8)
    assert value == pytest.approx(11, rel=1e-6)


def test_max_tokens_takes_the_beginning() -> None:
    ids = torch.randint(3, (50,))
    assert perplexity(HAND, ids, 4, max_tokens=10) == perplexity(HAND, ids[:10], 4)
    assert perplexity(HAND, ids, 4, max_tokens=99) == perplexity(HAND, ids, 4)


def test_progress_hears_of_every_token_that_was_read() -> None:
    seen: list[int] = []
    perplexity(HAND, torch.randint(3, (9001,)), 500, progress=seen.append)
    assert sum(seen) == 9000  # the last token stands alone in its window
    assert len(seen) > 1


@pytest.mark.parametrize("ids", [(), (1,)])
def test_fewer_than_two_tokens_are_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(MoesaicError, match=f"at least 2 tokens, the text has {len(ids)}"):
        perplexity(HAND, torch.tensor(ids, dtype=torch.long), 4)


def test_fewer_than_two_tokens_by_max_tokens_are_refused() -> None:
    with pytest.raises(MoesaicError, match="the text has 1"):
        perplexity(HAND, tokens(0, 1, 2), 4, max_tokens=1)


@pytest.mark.parametrize("length", [1, 0])
def test_windows_that_predict_nothing_are_refused(length: int) -> None:
    with pytest.raises(MoesaicError):
        perplexity(HAND, tokens(0, 1, 2), length)


def test_a_token_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(MoesaicError, match=r"tokens 0..3, the model knows 0..2"):
        perplexity(HAND, tokens(0, 3, 1), 4)


@pytest.mark.parametrize("token", [-1, -100])
def test_a_negative_token_is_refused(token: int) -> None:
    """-100 is the id that torch's loss skips."""
    with pytest.raises(MoesaicError):
        perplexity(HAND, tokens(0, 1, token), 4)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_refused(broken: float) -> None:
    logits_VV = torch.zeros(3, 3)
    logits_VV[1] = broken
    with pytest.raises(MoesaicError, match="loss is nan"):
        perplexity(Bigram(logits_VV), tokens(0, 1, 2), 4)


def test_a_token_of_probability_zero_is_refused() -> None:
    with pytest.raises(MoesaicError, match="loss is inf"):
        perplexity(Bigram(torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])), tokens(0, 1), 4)


def test_no_graph_is_built() -> None:
    class Watched(Bigram):
        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
            output = super().forward(input_ids, use_cache)
            assert not output.logits.requires_grad
            return output

    model = Watched(torch.zeros(3, 3))
    model.table.weight.requires_grad_()
    assert perplexity(model, tokens(0, 1, 2), 4)[0] == pytest.approx(3)
