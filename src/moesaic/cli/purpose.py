"""What a conversion is to be fast at: which method that asks for, and what it can gain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesaic.errors import MoesaicError, unknown

if TYPE_CHECKING:
    from moesaic.conversion.plan import Plan
    from moesaic.modeling.moe_config_moesaic import MoEConfig

PROMPT = 512
SEQUENCES = 16
SAVES_NOTHING = 0.995  # of the dense model's time

# docs/which_method.md says why. Tokens of many sequences together read every expert.
METHOD_FOR = {
    "prefill": "moesaic",
    "decode": "moesaic-neurons",
    "batch": "static-repaired",
}
_WORDS = {
    "prefill": f"a prompt of {PROMPT}",
    "decode": "one token",
    "batch": f"one token of each of {SEQUENCES} sequences",
}

# A prompt and a token over the dense model's time: SmolLM2-135M on 2 CPU cores of several
# processors, in 16 and 32 bits, experts and static pruning with a quarter skipped, neurons
# with half, thresholds with both (in vLLM with half; docs/speed.md). Then, where it was
# timed, a token of each of SEQUENCES answers.
_EXPERTS = (
    "transformers 0.82 to 1.11 and 0.74 to 0.95, vLLM with moesaic beside it 0.95 and 1.03, "
    "exported 1.21 to 1.45 and 0.92 to 0.97, llama.cpp 1.2 to 5.8 and 1.2 to 1.6",
    "transformers 0.90 to 0.93, vLLM with moesaic beside it 1.59, "
    "exported 1.35, llama.cpp 1.92",
)
MOST_TIMED = 128  # experts of those times; 256 of them were timed apart
_SMALL_EXPERTS = (
    "256 experts in transformers 0.94 to 1.05 and 0.85 to 0.90",
    None,
)
_BY_THRESHOLD = (
    "128 experts in transformers 0.84 to 1.08 and 0.68 to 0.91, in vLLM with moesaic beside "
    "it 1.02 and 1.06",
    "128 experts in transformers 1.08 to 1.09",
)
_NEURONS = (
    "transformers 1.00 to 1.09 and 0.73 to 0.94, vLLM with moesaic beside it 1.09 and 0.85 "
    "(with a C++ compiler and AVX-512)",
    "not timed: more than four tokens at once run all neurons",
)
_STATIC = (
    "transformers 0.91 to 0.95 and 0.93 to 0.96, vLLM 0.80 to 0.88 and 0.82 to 0.94, "
    "llama.cpp 0.93 and 0.86",
    "transformers 0.94, vLLM 1.02",
)


def method_for(purpose: str) -> str:
    """The method for prefill, decode or batch. Raises MoesaicError for other words."""
    if purpose not in METHOD_FOR:
        raise unknown("purpose", purpose, METHOD_FOR)
    return METHOD_FOR[purpose]


def time_lines(plan: Plan, purpose: str | None) -> list[str]:
    """What time the plan can save at best, by its counted work, and what was measured.

    And a warning where the purpose gains nothing. Takes a few seconds: work is counted
    on models without weights.
    """
    floors = floors_of(plan)
    if floors is None:
        return []
    told = []
    for name, floor in floors.items():
        value = "not known" if floor is None else f"{floor:.2f}"
        told.append(f"{_WORDS[name]} {value}")
    lines = [
        f"time over dense at best, by counted work: {', '.join(told)} (moesaic bench "
        "measures)"
    ]
    measured = _measured(plan.moe)
    if measured is not None:
        single, of_many = measured
        lines.append(
            "time over dense as measured with SmolLM2 on 2 CPU cores, a prompt and one "
            f"token: {single}"
        )
        if of_many is not None:
            lines.append(f"{_WORDS['batch']}, measured likewise: {of_many}")
    floor = None if purpose is None else floors[purpose]
    if purpose is not None and floor is not None and floor > SAVES_NOTHING:
        suited = METHOD_FOR[purpose]
        advice = f"leave --method out to get {suited}"
        if plan.method.name == suited:
            advice = "skip more, by --sparsity"
        lines.append(f"warning: nothing is saved for {purpose}; {advice}")
    return lines


def _measured(moe: MoEConfig) -> tuple[str, str | None] | None:
    """Times of models of this kind; None for those that were not timed."""
    from moesaic.modeling.moe_config_moesaic import NEURON_KINDS

    if not moe.layers:
        return None
    if moe.router is None:
        return _STATIC
    if moe.router.kind in NEURON_KINDS:
        return _NEURONS
    kinds = ("linear", "quadratic")
    if moe.router.chooser == "threshold" and moe.router.kind in kinds:
        return _BY_THRESHOLD
    # Others run their own way, or were not timed since their routers run in the kernel.
    is_usual = moe.router.kind == "linear" and moe.router.chooser == "topk"
    if not is_usual:
        return None
    are_small = moe.first_sizes.num_routed > MOST_TIMED
    return _SMALL_EXPERTS if are_small else _EXPERTS


def floors_of(plan: Plan) -> dict[str, float | None] | None:
    """Counted work over the dense model's, by purpose; None where it cannot be counted."""
    from moesaic.bench.floor import count, floor_of
    from moesaic.bench.regimes import Regime

    try:
        ours = count(plan.config, PROMPT)
        dense = count(plan.dense_config, PROMPT)
    except MoesaicError:
        return None
    one = Regime(batch=1, prompt=PROMPT, new=1)
    many = Regime(batch=SEQUENCES, prompt=PROMPT, new=1)
    return {
        "prefill": floor_of(ours, dense, one, "prefill"),
        "decode": floor_of(ours, dense, one, "decode"),
        "batch": floor_of(ours, dense, many, "decode"),
    }
