"""What a comparison lacks, and why: methods that cannot, and conversions that failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from moesaic.comparison.options import Goal

# Where it ended.
PLANNING = "planning"
CONVERSION = "conversion"
TUNING = "fine-tuning"


@dataclass(frozen=True)
class Missing:
    """A method that is not in a table, or not in whole, with the reason in one line.

    `seed` is None where no seed would help: the method is not for the model or the
    budget.
    """

    method: str
    role: str
    equal: str
    at: float | None
    step: str
    reason: str
    seed: int | None = None

    @property
    def goal(self) -> Goal:
        return Goal(self.equal, self.at)

    @property
    def failed(self) -> bool:
        """Whether it was tried: a later run may do better."""
        return self.step != PLANNING

    @property
    def words(self) -> str:
        where = f" at {self.goal.words}"
        if self.seed is not None:
            where += f", seed {self.seed}"
        return f"without {self.method}{where}: {self.reason}"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Missing:
        """From JSON. Raises KeyError where it was written by another version."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: values[name] for name in names})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def lines_of(missing: list[Missing]) -> list[str]:
    """What is in no table, a line each; for one reason in several tables, one in all.

    Rows that were converted and not fine-tuned say so themselves.
    """
    tables: dict[tuple[str, str], list[Missing]] = {}
    for row in missing:
        if row.step == TUNING:
            continue
        key = (row.method, row.reason)
        tables.setdefault(key, []).append(row)
    lines = []
    for group in tables.values():
        first = group[0]
        if len(group) == 1 or first.failed:
            lines += [row.words for row in group]
        else:
            lines.append(f"without {first.method}: {first.reason}")
    return lines
