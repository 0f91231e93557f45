"""What a comparison is asked for: made once, from the call or the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moesaic.conversion.options import make_budget
from moesaic.errors import MoesaicError
from moesaic.methods.base import Budget, Method

TEXT_TOKENS = 65_536  # of each text, unless said


@dataclass(frozen=True)
class CompareOptions:
    """All of a comparison's input. `moesaic.compare` says what each field means."""

    model: str
    methods: tuple[Method, ...]
    references: tuple[Method, ...]
    sparsities: tuple[float, ...]
    layout: str | None
    grain: str
    calibration: str
    texts: tuple[str, ...]
    seeds: int = 3
    samples: int | None = None
    sequence_length: int | None = None
    max_tokens: int = TEXT_TOKENS
    output: Path | None = None
    resume: bool = False
    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        methods = self.methods + self.references
        names = [method.name for method in methods]
        if len(set(names)) < len(names):
            listed = ", ".join(names)
            raise MoesaicError(f"methods {listed}: each name once")
        if self.seeds < 1 or self.max_tokens < 2 or not self.sparsities:
            sparsities = list(self.sparsities)
            raise MoesaicError(
                f"seeds {self.seeds}, max tokens {self.max_tokens}, sparsities "
                f"{sparsities}: at least 1 seed, 2 tokens and 1 sparsity are needed"
            )

    @property
    def budgets(self) -> list[Budget]:
        """One layout for all methods, or a budget for each sparsity."""
        if self.layout is not None:
            return [make_budget(self.layout)]
        return [
            Budget(None, sparsity, self.grain) for sparsity in self.sparsities
        ]
