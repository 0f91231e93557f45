"""What converting a mixture costs: its experts against one dense FFN of their total size.

    OMP_NUM_THREADS=1 python benchmarks/mixtures.py

Per layer: E experts of m neurons, k of them for a token, against a dense FFN of E m neurons, by the
same method and layout: on the same tokens, and with as many for each expert (E / k times). CPU time
of the conversion's own steps (attention and the check of inputs left out), measured in turn; random
weights, random tokens. Writes Markdown.

Quality on a trained mixture is `moesaic compare`; demo_model/train_moe.py trains one.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from moesaic.calibration.calibration_set import CalibrationSet
from moesaic.calibration.hidden_states import Stream
from moesaic.conversion.options import make_budget
from moesaic.conversion.plan import make_plan
from moesaic.conversion.run import Run
from moesaic.families import find_ffns
from moesaic.methods.load import load_method

TOKENS, LENGTH, ROUNDS = 16_384, 512, 2
SHAPES = [  # hidden size, experts, experts of a token, neurons of an expert
    (192, 8, 2, 152),
    (512, 16, 4, 256),
    (256, 64, 8, 64),
]
LAYOUT = "S3A3E8"
STEPS = {"convert", "measure", "stack"}


def models(
    hidden: int, experts: int, active: int, neurons: int
) -> tuple[Any, Any]:
    """A mixture and a dense model of one layer, of equal total FFN size."""
    common: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": hidden, "num_hidden_layers": 1, "head_dim": 64,
        "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64,
        "max_position_embeddings": LENGTH,
    }  # fmt: skip
    mixture = MixtralConfig(
        **common,
        intermediate_size=neurons,
        num_local_experts=experts,
        num_experts_per_tok=active,
    )
    dense = LlamaConfig(**common, intermediate_size=experts * neurons)
    torch.manual_seed(0)
    found = [
        AutoModelForCausalLM.from_config(config).eval()
        for config in (mixture, dense)
    ]
    for model in found:
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    return found[0], found[1]


def seconds(model: Any, name: str, layout: str, ids_NL: torch.Tensor) -> float:
    """CPU time of fitting one layer; the model is put back."""
    ffns = find_ffns(model)
    method = load_method(name)
    plan = make_plan(model.config, "random", method, make_budget(layout))
    stream = Stream(ffns, ids_NL, torch.device("cpu"))
    steps: dict[str, float] = {}
    wall = time.perf_counter
    time.perf_counter = (
        time.process_time
    )  # the steps' own clock: others use the machine too
    try:
        with ffns.restored():
            Run(
                stream, plan, CalibrationSet(ids_NL), 0, steps, trial=True
            ).replace_ffns(method)
    finally:
        time.perf_counter = wall
    return sum(value for step, value in steps.items() if step in STEPS)


def main() -> None:
    """Mixture over dense on the same tokens, and on E / k times as many for the mixture."""
    print(
        "| hidden | experts | of a token | neurons | method | same tokens | same per expert |"
    )
    print("|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        mixture, dense = models(*shape)
        more = shape[1] // shape[2]
        rows = TOKENS // LENGTH
        ids_NL = torch.randint(
            512, (rows * more, LENGTH), generator=torch.manual_seed(1)
        )
        for method in ("cmoe", "moesaic"):
            ratios: list[list[float]] = [[], []]
            for _ in range(ROUNDS):
                base = seconds(dense, method, LAYOUT, ids_NL[:rows])
                for found, tokens in zip(
                    ratios, (ids_NL[:rows], ids_NL), strict=True
                ):
                    found.append(
                        seconds(mixture, method, LAYOUT, tokens) / base
                    )
                print(
                    f"{shape} {method} {base:.2f} s, {ratios}", file=sys.stderr
                )
            cells = [
                f"{statistics.median(r):.2f} ({min(r):.2f}..{max(r):.2f})"
                for r in ratios
            ]
            row = [*map(str, shape), f"`{method}` {LAYOUT}", *cells]
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
