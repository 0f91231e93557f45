"""What a conversion did and what it cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from moesaic.conversion.layer_error import LayerReport

# In a model's folder: what its conversion did, what a training after it did, and an export.
CONVERSION_FILE = "moesaic_report.json"
RECOVERY_FILE = "moesaic_finetune.json"
EXPORT_FILE = "moesaic_export.json"

# Kinds of what pages and tables compute with.
NUMBER = (int, float)
OPTIONAL = (int, float, type(None))
KINDS: dict[str, Any] = {
    "method": dict,
    "layout": str,
    "tokens": NUMBER,
    "active_ffn_fraction": NUMBER,
    "dense_macs": NUMBER,
    "macs": NUMBER,
    "dense_bytes": NUMBER,
    "bytes": NUMBER,
    "dense_perplexity": OPTIONAL,
    "perplexity": OPTIONAL,
    "search": dict,
    "heldout_tokens": NUMBER,
}


@dataclass
class ConversionReport:
    """What was done and what it cost.

    Perplexities are None where nothing was held out. `recovery` is what training made
    of it, where `recover` was asked for: a FinetuneReport as plain data.
    """

    model: str
    method: dict[str, Any]  # name, about, settings
    layout: str
    shape: str
    calibration: str
    tokens: int
    sequence_length: int
    seed: int
    active_ffn_fraction: float
    dense_macs: float  # per token
    macs: float
    dense_bytes: float  # of weights read for one token
    bytes: float
    unit: str = "experts"  # or neurons, where each is an expert
    dense_perplexity: float | None = None
    perplexity: float | None = None
    budgets: list[int] = field(default_factory=list)  # by layer, if they differ
    # Of each layout that was tried: its error, or its perplexity ratio.
    search: dict[str, float] = field(default_factory=dict)
    heldout: str | None = None
    heldout_tokens: int = 0
    seconds: float = 0.0
    step_seconds: dict[str, float] = field(default_factory=dict)
    layers: list[LayerReport] = field(default_factory=list)
    recovery: dict[str, Any] | None = None

    @property
    def layers_measured_on(self) -> str:
        """The tokens that errors of layers are of, in words.

        A method that fits no weights chooses neurons by all calibration tokens.
        """
        if all(layer.heldout for layer in self.layers):
            return "held-out tokens"
        return "calibration tokens that neurons were chosen by"

    def to_dict(self, timing: bool = True) -> dict[str, Any]:
        """As plain data; without `timing` two equal runs give equal bytes."""
        values = asdict(self)
        values["layers"] = [layer.to_dict(timing) for layer in self.layers]
        if self.recovery is None:
            del values["recovery"]
        if not timing:
            del values["seconds"]
            del values["step_seconds"]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ConversionReport:
        """What `to_dict` gave, with or without timing.

        Raises TypeError for a value of another kind.
        """
        _check_kinds(values)
        layers = []
        for row in values["layers"]:
            with_seconds = {"seconds": None} | row
            layers.append(LayerReport(**with_seconds))
        return cls(**values | {"layers": layers})


def _check_kinds(values: dict[str, Any]) -> None:
    """A file may have been edited."""
    for name, kind in KINDS.items():
        value = values.get(name)
        if name in values and not isinstance(value, kind):
            raise TypeError(f"{name} is {value!r}")
