"""Table 1: accuracy on five choice tasks, zero-shot, after light fine-tuning."""

from __future__ import annotations

from moesaic.experiments.contents import FIVE
from moesaic.experiments.rows import (
    accuracy_row,
    method_of,
    task_columns,
    tuned_contenders,
)
from moesaic.experiments.study import Study
from moesaic.experiments.table import Table

METHODS = (
    "slicegpt",
    "sleb",
    "llama-moe",
    "llama-moe-v2",
    "emoe",
    "cmoe",
    "moesaic",
    "static",
)

# Percent: PIQA, WinoGrande, ARC-E, ARC-C, HellaSwag. The paper's method is cmoe.
PAPER = {
    "Llama-2 7B": {
        "dense": (78.78, 69.06, 74.58, 46.16, 76.00),
        "slicegpt": (65.71, 62.88, 59.76, 33.21, 51.34),
        "sleb": (73.13, 58.98, 57.90, 33.02, 62.47),
        "llama-moe": (49.35, 50.28, 54.04, 26.37, 25.77),
        "llama-moe-v2": (63.55, 59.35, 63.77, 34.81, 54.89),
        "emoe": (72.47, 64.48, 58.63, 35.75, 60.80),
        "cmoe": (74.34, 65.77, 67.09, 40.35, 69.36),
    },
    "Llama-2 70B": {
        "dense": (82.70, 77.98, 80.98, 57.34, 83.84),
        "slicegpt": (68.91, 70.06, 64.56, 41.14, 56.26),
        "sleb": (77.39, 65.55, 62.37, 40.11, 68.39),
        "llama-moe": (51.95, 56.50, 59.09, 32.40, 27.57),
        "llama-moe-v2": (66.79, 66.57, 68.94, 42.38, 59.57),
        "emoe": (76.34, 72.33, 63.47, 43.62, 66.19),
        "cmoe": (78.49, 73.49, 73.32, 49.86, 76.12),
    },
    "Qwen-2.5-7B": {
        "dense": (79.82, 73.16, 77.36, 51.02, 78.86),
        "slicegpt": (66.19, 66.51, 61.88, 36.69, 53.21),
        "sleb": (74.95, 61.76, 59.95, 35.80, 64.41),
        "llama-moe": (49.63, 53.21, 57.05, 28.64, 25.65),
        "llama-moe-v2": (64.25, 62.71, 65.77, 37.59, 56.06),
        "emoe": (73.98, 65.41, 60.63, 38.48, 62.71),
        "cmoe": (75.93, 69.36, 70.59, 43.86, 72.21),
    },
    "Qwen-3-30B-A3B": {
        "dense": (84.51, 79.18, 84.43, 57.88, 87.44),
        "slicegpt": (70.60, 71.58, 66.88, 41.85, 58.41),
        "sleb": (79.16, 66.01, 70.08, 42.11, 71.74),
        "llama-moe": (52.18, 54.48, 62.50, 30.77, 28.32),
        "llama-moe-v2": (65.54, 67.24, 71.27, 41.99, 62.78),
        "emoe": (74.76, 70.50, 65.78, 43.12, 70.62),
        "cmoe": (80.23, 74.84, 76.75, 48.80, 80.71),
    },
}


def run(study: Study) -> Table:
    notes = [
        "slicegpt and sleb at 20 %, or as near as whole blocks and groups of axes come; "
        "their result is a dense model, which moesaic finetune does not train",
        "moesaic and static are not in the paper",
    ]
    models = {"dense": study.model}
    models |= tuned_contenders(study, METHODS, notes)
    rows = []
    for name, model in models.items():
        numbers = PAPER[study.paper_model].get(method_of(name))
        paper = {} if numbers is None else dict(zip(FIVE, numbers, strict=True))
        rows.append(accuracy_row(study, name, model, FIVE, notes, paper))
    return Table(task_columns(FIVE), rows, notes)
