"""What a conversion is asked for: made once, from the call or the command line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from moesaic.errors import MoesaicError
from moesaic.families.load import dtype_name
from moesaic.layout import Layout
from moesaic.methods.base import Budget, FFNMethod, Method
from moesaic.methods.load import load_method


@dataclass(frozen=True)
class Scope:
    """Which parts of a model are converted.

    `experts` and `min_tokens` are for a model that is a mixture already: those to
    convert (None: all), and how many tokens one must see (None: as many as it has
    neurons). `dense_layers` stay as they are.
    """

    experts: tuple[int, ...] | None = None
    min_tokens: int | None = None
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class ConvertOptions:
    """All of a conversion's input. `moesaic.convert` says what each field means."""

    model: Any
    method: Method
    budget: Budget
    calibration: Any
    scope: Scope = Scope()
    target_ratio: float | None = None
    tokenizer: Any = None
    output: Path | None = None
    samples: int | None = None
    sequence_length: int | None = None
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    overwrite: bool = False
    resume: bool = False
    trust_remote_code: bool = False
    command: str | None = None
    progress: bool = False

    @property
    def sources(self) -> dict[str, Any]:
        """The calibration texts by name: several are a domain each."""
        if isinstance(self.calibration, Mapping):
            return dict(self.calibration)
        return {"": self.calibration}

    @property
    def in_memory(self) -> bool:
        """Whether the model was given as an object."""
        return not isinstance(self.model, str | Path)

    @property
    def model_name(self) -> str:
        """What messages and reports call the model."""
        if not self.in_memory:
            return str(self.model)
        class_name = type(self.model).__name__
        return self.model.config.name_or_path or class_name


def make_options(
    model: Any,
    recipe: str | Path | Method,
    layout: str | Layout | None,
    calibration: Any,
    *,
    settings: Mapping[str, object] | None = None,
    sparsity: float | None = None,
    target_ratio: float | None = None,
    grain: str | None = None,
    output: str | Path | None = None,
    experts: Sequence[int] | None = None,
    min_tokens: int | None = None,
    dense_layers: Sequence[int] = (),
    dtype: str | torch.dtype = "auto",
    **others: Any,
) -> ConvertOptions:
    """The options that the keyword arguments of `moesaic.convert` stand for.

    Raises MoesaicError for an unknown method or setting, for values of another kind, for
    a layout and a sparsity at once, and for a grain that would change nothing.
    """
    _check_number("sparsity", sparsity)
    _check_number("target ratio", target_ratio)
    method = load_method(recipe, settings)
    if grain is not None:
        check_grain(grain, layout, method)
    chosen = None if experts is None else _numbers("experts", experts)
    dense = _numbers("dense layers", dense_layers)
    folder = None if output is None else Path(output).absolute()
    return ConvertOptions(
        model=model,
        method=method,
        budget=make_budget(layout, sparsity, grain or "medium"),
        calibration=calibration,
        scope=Scope(chosen, min_tokens, dense),
        target_ratio=target_ratio,
        output=folder,
        dtype=dtype_name(dtype),
        **others,
    )


def _check_number(name: str, value: object) -> None:
    if value is not None and not isinstance(value, Real):
        raise MoesaicError(f"{name} {value!r}: a number is needed")


def _numbers(name: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise MoesaicError(
            f"{name} {values!r}: several numbers are needed, as (0, 1)"
        )
    return tuple(values)


def check_grain(grain: str, layout: Any, method: Method) -> None:
    """Raises MoesaicError for a grain that was given and would change nothing."""
    check_grain_or_layout(grain, layout)
    takes_grain = (
        isinstance(method, FFNMethod)
        and method.takes_grain
        and method.experts is None
    )
    if not takes_grain:
        raise MoesaicError(
            f"grain {grain}: method {method.name!r} does not choose how many experts "
            "there are; leave the grain out, or take another method"
        )


def check_grain_or_layout(grain: str, layout: Any) -> None:
    """Raises MoesaicError where both were given."""
    if layout is not None:
        raise MoesaicError(
            f"grain {grain} and layout {layout}: give one, the layout says how many "
            "experts there are"
        )


def make_budget(
    layout: str | Layout | None,
    sparsity: float | None = None,
    grain: str = "medium",
) -> Budget:
    """A budget from what the user said. Raises MoesaicError where that is too much."""
    if layout is not None and sparsity is not None:
        raise MoesaicError(
            f"layout {layout} and sparsity {sparsity}: give one, it fixes the other"
        )
    if layout is not None and not isinstance(layout, Layout):
        layout = Layout.parse(layout)
    return Budget(layout, sparsity, grain)
