"""What a folder says of its own conversion: configuration, report, training.

Nothing is computed here but counts of work.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moesaic.conversion.report import (
    CONVERSION_FILE,
    EXPORT_FILE,
    RECOVERY_FILE,
    ConversionReport,
)
from moesaic.errors import MoesaicError, reason_of
from moesaic.evaluate.work import active_ffn_fraction, is_converted
from moesaic.families.load import load_config, resolve
from moesaic.methods.contents import METHODS


@dataclass(frozen=True)
class Record:
    """One converted model's history.

    `provenance` is what its configuration keeps (MoEConfig.provenance). `report` is
    None where the folder holds none, `recovery` where nothing was trained.
    `prompts_run_all`: all neurons, where tokens of an answer run some.
    """

    model: str  # as the user named it
    provenance: dict[str, Any]
    active_ffn_fraction: float
    report: ConversionReport | None
    recovery: dict[str, Any] | None
    prompts_run_all: bool = False

    @property
    def base(self) -> str:
        """The dense model's name, without private folders."""
        return Path(self.provenance["base_model"]).name

    @property
    def method(self) -> str:
        return str(self.provenance["method"]["name"])

    @property
    def title(self) -> str:
        return f"{self.base}, {self.method} {self.layout}".rstrip()

    @property
    def layout(self) -> str:
        return str(self.provenance.get("layout", ""))

    @property
    def paper(self) -> tuple[str, str] | None:
        """The method's paper and its address, where it has one."""
        known = METHODS.get(self.method)
        if known is None or known.paper is None or known.url is None:
            return None
        return known.paper, known.url

    @property
    def perplexities(self) -> dict[str, float]:
        """Dense, converted and recovered, all of one text, as far as they were measured.

        After a training on another text: what it measured there.
        """
        values: dict[str, float | None] = {}
        if self.report is not None:
            values["dense"] = self.report.dense_perplexity
            values["converted"] = self.report.perplexity
        if self.recovery is not None:
            if not self.measured_alike:
                values = {"converted": self.recovery["perplexity_before"]}
            folded = self.recovery["folded"]
            name = "folded_perplexity" if folded else "perplexity"
            values["recovered"] = self.recovery[name]
        return {
            name: value for name, value in values.items() if value is not None
        }

    @property
    def measured_alike(self) -> bool:
        """Whether conversion and training were measured on the same text."""
        if self.report is None or self.recovery is None:
            return False
        before = self.recovery["perplexity_before"]
        after = self.report.perplexity
        if before is None or after is None:
            return False
        return math.isclose(before, after, rel_tol=1e-3)

    @property
    def conversion_ratio(self) -> float | None:
        """What the conversion alone came to, on its own held-out text."""
        report = self.report
        if report is None or not report.dense_perplexity:
            return None
        if report.perplexity is None:
            return None
        return report.perplexity / report.dense_perplexity

    @property
    def ratio(self) -> float | None:
        """Perplexity of what was written, over the dense model's."""
        values = self.perplexities
        if "dense" not in values or len(values) < 2:
            return None
        last = list(values.values())[-1]
        return last / values["dense"]

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        values = asdict(self)
        if self.report is not None:
            values["report"] = self.report.to_dict(timing=False)
        return values


def read_record(model: str, trust_remote_code: bool = False) -> Record:
    """Reads a converted model's history.

    Raises MoesaicError for what is no model, a model that moesaic did not convert, and
    a report that is damaged.
    """
    config = load_config(model, trust_remote_code)
    provenance = _provenance(config)
    folder = Path(resolve(model))
    if provenance is None and (folder / EXPORT_FILE).is_file():
        raise MoesaicError(
            f"{model} is an export, which holds a stock model ({config.model_type}) and no "
            "notes of ours; inspect the model that it was made from"
        )
    if provenance is None:
        raise MoesaicError(
            f"{model} was not converted by moesaic ({config.model_type}); convert it "
            f"first: moesaic convert {model} --output DIR, then moesaic inspect DIR"
        )
    return Record(
        model=str(model),
        provenance=provenance,
        active_ffn_fraction=active_ffn_fraction(config),
        report=_read(folder / CONVERSION_FILE, ConversionReport.from_dict),
        recovery=_read(folder / RECOVERY_FILE, _checked_recovery),
        prompts_run_all=_prompts_run_all(config),
    )


def _prompts_run_all(config: Any) -> bool:
    """Whether every converted layer runs all neurons for a prompt."""
    if not is_converted(config) or not config.moesaic.sizes:
        return False
    moe = config.moesaic
    return all(moe.block.all_run_in_prompts(sizes) for sizes in moe.sizes)


def _provenance(config: Any) -> dict[str, Any] | None:
    """None for a model that was not converted."""
    if is_converted(config):
        values: dict[str, Any] = config.moesaic.provenance()
        return values
    kept = getattr(config, "moesaic_conversion", None)
    if not isinstance(kept, dict):
        return None
    if not isinstance(kept.get("method"), dict) or "base_model" not in kept:
        raise MoesaicError(
            "the config.json's moesaic_conversion is damaged; convert the model again"
        )
    return kept


def _read(path: Path, parse: Callable[[dict[str, Any]], Any]) -> Any:
    """What a JSON file holds; None where there is none."""
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text("utf-8"))
        return parse(values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MoesaicError(
            f"{path} is damaged ({reason_of(error)}); convert the model again, or remove the "
            "file to inspect the model without it"
        ) from error


def _checked_recovery(values: dict[str, Any]) -> dict[str, Any]:
    """The report of a training, which has to hold what is read of it."""
    for name in (
        "perplexity_before",
        "perplexity",
        "folded_perplexity",
        "folded",
        "settings",
    ):
        values[name]
    return values
