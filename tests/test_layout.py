"""SxAyEz: what it means, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.errors import MoesaicError
from moesaic.layout import Layout


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    total = draw(st.integers(1, 70))
    shared = draw(st.integers(0, total - 1))
    return Layout(shared, draw(st.integers(1, total - shared)), total)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("S3A3E8", Layout(3, 3, 8)),
        ("S0A1E1", Layout(0, 1, 1)),
        ("S1A7E8", Layout(1, 7, 8)),
        ("S12A36E64", Layout(12, 36, 64)),
        ("s3a3e8", Layout(3, 3, 8)),
        (" S3A3E8 ", Layout(3, 3, 8)),
    ],
)
def test_parse_reads_shared_active_total(text: str, expected: Layout) -> None:
    assert Layout.parse(text) == expected


def test_routed_experts_are_those_that_are_not_shared() -> None:
    assert Layout.parse("S3A2E8").num_routed == 5


@pytest.mark.parametrize(
    "text",
    ["", "8", "E8", "S3E8", "A3S3E8", "S3A3E8x", "xS3A3E8", "S3 A3 E8", "S3A3E", "S-1A3E8",
     "S3A3E8.5", "S3,A3,E8", "S3A3E8S3A3E8", "S3A3E1234567"],
)  # fmt: skip
def test_any_other_form_is_refused_and_named(text: str) -> None:
    with pytest.raises(MoesaicError, match="not of the form SxAyEz") as refusal:
        Layout.parse(text)
    assert repr(text) in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("S3A0E8", "A >= 1"),
        ("S8A1E8", "E must exceed S"),
        ("S9A1E8", "E must exceed S"),
        ("S0A1E0", "E must exceed S"),
        ("S3A6E8", "A <= E - S"),
    ],
)
def test_an_impossible_count_is_refused_with_its_rule(text: str, rule: str) -> None:
    with pytest.raises(MoesaicError) as refusal:
        Layout.parse(text)
    assert text in str(refusal.value)
    assert rule in str(refusal.value)


def test_the_constructor_checks_as_parse_does() -> None:
    with pytest.raises(MoesaicError, match="S3A6E8"):
        Layout(3, 6, 8)


def test_a_negative_number_of_shared_experts_is_refused() -> None:
    with pytest.raises(MoesaicError):
        Layout(-1, 1, 2)


@pytest.mark.parametrize(
    ("intermediate_size", "layout", "expert", "shared"),
    [
        (172, "S3A3E8", 21, 67),  # 172 = 8 * 21 + 4
        (172, "S4A4E16", 10, 52),  # 172 = 16 * 10 + 12
        (172, "S8A12E32", 5, 52),  # 172 = 32 * 5 + 12
        (352, "S3A3E8", 44, 132),
        (352, "S4A4E16", 22, 88),
        (352, "S8A12E32", 11, 88),
        (11008, "S3A3E8", 1376, 4128),
        (11008, "S4A4E16", 688, 2752),
        (11008, "S8A12E32", 344, 2752),
        (7, "S0A2E3", 2, 1),  # what is left over is shared even where nothing else is
    ],
)
def test_leftover_neurons_join_the_shared_expert(
    intermediate_size: int, layout: str, expert: int, shared: int
) -> None:
    sizes = Layout.parse(layout).sizes(intermediate_size)
    assert (sizes.expert, sizes.shared) == (expert, shared)


def test_the_active_count_is_the_true_one() -> None:
    """172 neurons at S3A3E8: 67 shared + 3 * 21, not three quarters of 172."""
    assert Layout.parse("S3A3E8").sizes(172).active == 130
    assert Layout.parse("S3A3E8").sizes(11008).active == 11008 * 6 // 8


def test_more_experts_than_neurons_is_refused() -> None:
    assert Layout.parse("S3A3E8").sizes(8).expert == 1
    with pytest.raises(MoesaicError, match="E <= 7"):
        Layout.parse("S3A3E8").sizes(7)


@settings(deadline=None)
@given(layout=layouts(), intermediate_size=st.integers(1, 20_000))
def test_no_neuron_is_lost(layout: Layout, intermediate_size: int) -> None:
    """Shared and equal routed experts make up the FFN; less than one expert is left over."""
    if intermediate_size < layout.num_total:
        with pytest.raises(MoesaicError):
            layout.sizes(intermediate_size)
        return
    sizes = layout.sizes(intermediate_size)
    assert sizes.total == sizes.shared + layout.num_routed * sizes.expert == intermediate_size
    assert 0 <= sizes.shared - layout.num_shared * sizes.expert < layout.num_total
    assert sizes.active == sizes.total - (layout.num_routed - layout.num_active) * sizes.expert


@given(layouts())
def test_text_round_trip(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout
