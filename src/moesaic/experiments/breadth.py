"""Table 2: knowledge, code and arithmetic at 25 % sparsity (S3A3E8), fine-tuned."""

from __future__ import annotations

from moesaic.experiments.rows import (
    accuracy_row,
    task_columns,
    tuned_contenders,
)
from moesaic.experiments.study import Study
from moesaic.experiments.table import Table

TASKS = ("mmlu", "humaneval", "gsm8k")
METHODS = ("llama-moe", "llama-moe-v2", "emoe", "cmoe", "moesaic")

# Percent, of Llama-2 7B; the paper has no dense row.
PAPER = {
    "llama-moe": (35.09, 7.58, 7.41),
    "llama-moe-v2": (38.02, 9.32, 10.09),
    "emoe": (43.11, 10.29, 12.55),
    "cmoe": (44.02, 11.22, 13.01),
}


def run(study: Study) -> Table:
    notes = ["the paper has no dense row, and moesaic is not in it"]
    tasks = list(TASKS)
    if not study.allow_code_execution:
        tasks.remove("humaneval")
        notes.append(
            "HumanEval not run: it runs what the model writes, and "
            "--allow-code-execution was not given"
        )
    models = {"dense": study.model}
    models |= tuned_contenders(study, METHODS, notes)
    rows = []
    for name, model in models.items():
        numbers = PAPER.get(name)
        paper = (
            {} if numbers is None else dict(zip(TASKS, numbers, strict=True))
        )
        rows.append(accuracy_row(study, name, model, tasks, notes, paper))
    return Table(task_columns(TASKS), rows, notes)
