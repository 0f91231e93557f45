"""What to do next where a conversion lost too much."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from moesaic.layout import GRAINS, Layout
from moesaic.methods.contents import METHODS

if TYPE_CHECKING:
    from moesaic.conversion.report import ConversionReport
    from moesaic.modeling import MoEConfig

ACCEPTABLE_RATIO = 1.03  # perplexity over the dense model's
HALF = 16  # bits of a weight in bfloat16
FEW_TOKENS = 65_536  # as many calibration tokens are usual at least
# `moesaic` still gains from as many (SmolLM2, benchmarks/results).
MANY_TOKENS = 262_144
OURS = "moesaic"
DYNAMIC = "moesaic-dynamic"
NEURONS = "moesaic-neurons"
DENSE_FIRST = "layer_budgets=dense-first"


def loss_ratio(report: ConversionReport) -> float | None:
    """Perplexity over the dense model's; None where it was not measured."""
    if report.perplexity is None or report.dense_perplexity is None:
        return None
    return report.perplexity / report.dense_perplexity


def next_steps(report: ConversionReport, output: str) -> list[str]:
    """What may lose less, cheapest to try first. Empty where little was lost."""
    ratio = loss_ratio(report)
    if ratio is None or ratio <= ACCEPTABLE_RATIO:
        return []
    method = report.method["name"]
    steps: list[str] = []
    if report.tokens < FEW_TOKENS:
        steps.append(
            f"more calibration text: {report.tokens:,} tokens are few; --samples so "
            f"that samples x sequence length is {FEW_TOKENS:,} or more"
        )
    if _could_be_finer(report):
        steps.append(
            "a finer grain, more and smaller experts: --grain fine without --layout"
        )
    if FEW_TOKENS <= report.tokens < MANY_TOKENS and method == OURS:
        steps.append(
            "more calibration text, which takes longer in proportion: --samples so that "
            f"samples x sequence length is {MANY_TOKENS:,}"
        )
    is_mixture = any(layer.experts for layer in report.layers)
    if _could_be_dense_first(report, is_mixture):
        steps.append(
            "the first layers whole and fewer experts in the others, at the same work: "
            f"--set {DENSE_FIRST} (stock engines hold it)"
        )
    steps += _other_methods(report, is_mixture)
    skipped = _skipped(report)
    replaces_ffns = _replaces_ffns(method)
    if skipped > 0:
        lower = (
            f"a lower sparsity: this one skips {skipped:.0%} of the FFN neurons"
        )
        if replaces_ffns and _can_be_searched(method):
            lower += (
                f"; or --target-ratio {ACCEPTABLE_RATIO}, which finds how much can "
                "be skipped"
            )
        steps.append(lower)
    if replaces_ffns:
        command = ["moesaic", "finetune", output, "--output", f"{output}-tuned"]
        steps.append(f"a little training: {shlex.join(command)}")
    return steps


def _can_be_searched(method: str) -> bool:
    """Whether a target ratio finds a budget."""
    from moesaic.conversion.layout_search import can_have_equal_layers
    from moesaic.methods.load import load_method

    return can_have_equal_layers(load_method(method))


def _replaces_ffns(method: str) -> bool:
    """Whether what it makes can be fine-tuned, and has experts that a target counts.

    Not where linear layers or the whole model are changed.
    """
    from moesaic.methods.base import FFNMethod
    from moesaic.methods.load import load_method

    if method not in METHODS or METHODS[method].runs is None:
        return False
    return isinstance(load_method(method), FFNMethod)


def _could_be_finer(report: ConversionReport) -> bool:
    """Whether the grain fine would make more experts. Other methods fix the number."""
    if report.method["name"] not in {OURS, DYNAMIC}:
        return False
    return Layout.parse(report.layout).num_total <= GRAINS["medium"]


def _could_be_dense_first(report: ConversionReport, is_mixture: bool) -> bool:
    """Whether layers ran the same number of experts, where the first could run all."""
    if report.method["name"] != OURS or is_mixture or len(report.layers) < 2:
        return False
    return bool(report.method["settings"].get("layer_budgets") == "uniform")


def _skipped(report: ConversionReport) -> float:
    """Share of the FFN neurons that a token skips."""
    return 1 - report.active_ffn_fraction


def _other_methods(report: ConversionReport, is_mixture: bool) -> list[str]:
    """Methods that lose less than this one, with what they ask for."""
    method = report.method["name"]
    steps: list[str] = []
    if not method.startswith(OURS):
        what = "a method that repairs its outputs"
        if any(layer.repair is not None for layer in report.layers):
            what = "experts chosen for each token"
        steps.append(f"{what}: --method {OURS}")
    if method == OURS:
        steps.append(
            f"as many experts for each token as it needs: --method {DYNAMIC} "
            f"({METHODS[DYNAMIC].runs})"
        )
    if method in {OURS, DYNAMIC} and not is_mixture:
        steps.append(
            "every neuron an expert, which is fast for one user at a time, where FFNs "
            "have gates: "
            f"--method {NEURONS} ({METHODS[NEURONS].runs})"
        )
    return steps


def note_on_copies(moe: MoEConfig) -> str | None:
    """What low-bit copies cost and gain where the weights were quantised before.

    In shares of the bytes of FFN weights that a token reads, scales left out. None
    without copies, where rows have 8 bits, and where weights came from no quantised file.
    """
    router = moe.router
    if router is None or router.bits is None or moe.source is None:
        return None
    if moe.block.replacement == "int8-neurons":
        return None
    found = re.search(r"\(I?Q(\d)", moe.source)
    if found is None:
        return None
    bits = int(found[1])
    as_it_came = _share_of_bytes(moe, bits)
    in_bfloat16 = _share_of_bytes(moe, HALF)
    return (
        f"note: {moe.source}; with rows in {bits} bits a token would read "
        f"{as_it_came:.2f} of the FFNs' bytes, {router.bits}-bit copies included; in "
        f"bfloat16 it reads {in_bfloat16:.2f}: copies pay where weights "
        "have more bits than they"
    )


def _share_of_bytes(moe: MoEConfig, bits: int) -> float:
    """Bytes of copies and rows over the dense FFNs', with weights of so many bits."""
    router = moe.router
    assert router is not None
    assert router.bits is not None
    rows = 0
    all_rows = 0
    for sizes in moe.sizes:
        rows += 2 * router.num_exact(sizes) + sizes.num_active
        all_rows += 3 * sizes.num_routed
    copies = 2 / 3 * router.bits / bits
    return copies + rows / all_rows
