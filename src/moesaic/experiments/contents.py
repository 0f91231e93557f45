"""Table of contents: every table and figure of the paper. Read without importing torch."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.errors import MoesaicError, unknown

ALL = "all"
FIVE = ("piqa", "winogrande", "arc_easy", "arc_challenge", "hellaswag")
DOMAINS = ("wiki", "c4", "code", "maths", "science")


@dataclass(frozen=True)
class Experiment:
    """A table or figure: its name, which is its module's, and the paper's label for it.

    `claim` is what the paper reads from it. `tasks` and `texts` are what it needs. `cost`
    is its share of the time, by which the time left is told: seconds of CPU at smoke.
    `paper_model` is whose numbers the paper has; None: of several models. `is_timed`:
    prompts of the scale's lengths are timed.
    """

    name: str
    label: str
    title: str
    claim: str
    cost: float
    tasks: tuple[str, ...] = ()
    texts: tuple[str, ...] = ("wiki",)
    paper_model: str | None = "Llama-2 7B"
    is_timed: bool = False

    @property
    def where(self) -> str:
        return f"moesaic.experiments.{self.name}"


EXPERIMENTS = {
    row.name: row
    for row in (
        Experiment(
            "zero_shot",
            "Table 1",
            "zero-shot accuracy at 25 % sparsity, fine-tuned",
            "The paper's method is ahead of all others on all five tasks.",
            90,
            tasks=FIVE,
            paper_model=None,
        ),
        Experiment(
            "breadth",
            "Table 2",
            "MMLU, HumanEval and GSM8K at 25 % sparsity",
            "The paper's method is ahead of LLaMA-MoE and EMoE in all three.",
            25,
            tasks=("mmlu", "gsm8k", "humaneval"),
        ),
        Experiment(
            "training_free",
            "Table 3",
            "training-free against fine-tuned",
            "Most of the quality is there before any training.",
            15,
            tasks=("mmlu",),
            texts=("wiki", "c4"),
        ),
        Experiment(
            "calibration",
            "Table 4",
            "calibration: source and number of windows",
            "8 windows do nearly as well as 64, from either source.",
            65,
            tasks=("mmlu",),
            texts=("wiki", "c4"),
        ),
        Experiment(
            "domain_overlap",
            "Section 5.3",
            "overlap of shared neurons across domains",
            "Maths, science and code share 80 to 86 % of the shared neurons.",
            3,
            texts=("wiki", "code", "maths", "science"),
        ),
        Experiment(
            "clustering_router",
            "Table 5",
            "grouping of neurons by router, fine-tuned",
            "The analytical router improves every grouping; the paper's own is ahead.",
            60,
            tasks=("mmlu",),
            texts=("wiki", "code", "maths"),
        ),
        Experiment(
            "token_budget",
            "Table 6",
            "token budget and conversion time",
            "4 M tokens and minutes instead of billions and days.",
            1,
        ),
        Experiment(
            "flops",
            "Table 7",
            "FLOPs, MACs and throughput",
            "16.6 % fewer FLOPs and 14.8 % more tokens a second.",
            25,
            is_timed=True,
        ),
        Experiment(
            "wina",
            "Table 8",
            "activation sparsity (WINA) on top of experts",
            "What WINA and experts save adds up.",
            90,
            is_timed=True,
        ),
        Experiment(
            "speed",
            "Table 9",
            "speed by configuration and regime",
            "1.02 to 1.17 times as fast; most so with one shared expert of eight.",
            90,
            paper_model="Qwen-2.5 72B",
            is_timed=True,
        ),
        Experiment(
            "sparsity_perplexity",
            "Table 10",
            "perplexity over sparsity, 16 experts",
            "At 12.5 % the model is better than the dense one.",
            130,
        ),
        Experiment(
            "self_consistency",
            "Table 11",
            "votes of several answers (self-consistency)",
            "Voting gains the sparse model 4.7 points and the dense one 0.6.",
            60,
            tasks=("piqa", "arc_easy", "arc_challenge", "gsm8k"),
            paper_model=None,
        ),
        Experiment(
            "hierarchical",
            "Tables 1 and 7",
            "a mixture's own experts, converted again (Section 4.4)",
            "Qwen3-30B-A3B saves 14.9 % of its MACs for 4 to 9 points.",
            55,
            tasks=FIVE,
            paper_model="Qwen3-30B-A3B",
        ),
        Experiment(
            "hidden_states",
            "Figure 1",
            "distribution of FFN hidden states",
            "Most activations are near zero.",
            2,
        ),
        Experiment(
            "activation_rates",
            "Figure 2",
            "distribution of activation rates, by K_a",
            "Most neurons are rarely active, some nearly always; so for every K_a.",
            3,
        ),
        Experiment(
            "data_efficiency",
            "Figure 4",
            "quality over fine-tuning windows",
            "1,024 windows are nearly as good as more.",
            10,
            tasks=("piqa",),
        ),
        Experiment(
            "load_balance",
            "Figure 5",
            "loads of experts before and after fine-tuning",
            "The bias evens out what was skewed.",
            1,
        ),
        Experiment(
            "expert_configuration",
            "Figure 6",
            "accuracy by expert configuration, at 25 % sparsity",
            "S6A6E16 is best on PIQA and ARC-Easy, S3A9E16 on WinoGrande.",
            50,
            tasks=FIVE,
        ),
    )
}


def chosen(tables: str) -> list[Experiment]:
    """Those that `tables` names with commas, in the order of the contents.

    Raises MoesaicError for a name that there is not.
    """
    names = [name.strip() for name in tables.split(",") if name.strip()]
    if not names:
        listed = ", ".join(EXPERIMENTS)
        raise MoesaicError(f"--tables names none; known are {listed}")
    for name in names:
        if name != ALL and name not in EXPERIMENTS:
            raise unknown("table", name, EXPERIMENTS)
    if ALL in names:
        return list(EXPERIMENTS.values())
    return [row for row in EXPERIMENTS.values() if row.name in names]
