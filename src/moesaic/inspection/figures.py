"""Charts of the page with the numbers that they show: what each layer loses, and who runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from markupsafe import Markup

from moesaic.conversion.layer_error import LayerReport
from moesaic.inspection import charts
from moesaic.inspection.answers import percent
from moesaic.inspection.charts import Series, short
from moesaic.inspection.measure import HIGHEST_RATE, RATE_BINS
from moesaic.inspection.record import Record

if TYPE_CHECKING:
    from moesaic.inspection.inspect import Inspected

NOTHING = "-"
_HEAT_COLUMNS = 64
# References of a layer: their names, and the looks of those that are drawn.
REFERENCES = {
    "static": "static pruning",
    "static-repaired": "static pruning, repaired",
    "random": "random neurons",
    "unrepaired": "what it chooses, by the dense weights",
    "oracle": "oracle",
    "neuron-oracle": "neuron oracle",
}
_DRAWN = {"static": 1, "static-repaired": 2, "oracle": 3}
_OTHER_LOOK = 4  # of the model beside


@dataclass(frozen=True)
class Table:
    """Heads, and rows of cells."""

    heads: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Figure:
    """A chart with the numbers that it shows, and what its lines are."""

    title: str
    caption: str
    svg: Markup
    table: Table
    legend: list[Series] = field(default_factory=list)
    scale: tuple[str, str] | None = None  # of a heat map: the ends' words


# --- by layer --------------------------------------------------------------------------


def layer_figures(record: Record, other: Inspected | None) -> list[Figure]:
    """Errors of the model beside the other's, and how well the router of each chooses."""
    layers = _layers_of(record)
    others = [] if other is None else _layers_of(other.record)
    figures = []
    if layers:
        figures.append(_error_figure("this model", record, others))
    elif others:
        assert other is not None
        figures.append(_error_figure("the other model", other.record, []))
    for whose, of_model in (
        ("this model", layers),
        ("the other model", others),
    ):
        if any(layer.router_recall is not None for layer in of_model):
            figure = _router_figure(of_model)
            if others:
                figure = replace(figure, title=f"{figure.title}: {whose}")
            figures.append(figure)
    return figures


def _layers_of(record: Record) -> list[LayerReport]:
    return [] if record.report is None else record.report.layers


def _error_figure(
    whose: str, record: Record, others: list[LayerReport]
) -> Figure:
    """The errors of a model called `whose`, those of its references, and another's."""
    report = record.report
    assert report is not None
    layers = report.layers
    places = [layer.layer for layer in layers]
    errors = [layer.relative_error for layer in layers]
    series = [Series(whose, errors, 0)]
    by_reference = {
        name: [layer.references.get(name) for layer in layers]
        for name in REFERENCES
    }
    for name, look in _DRAWN.items():
        if any(value is not None for value in by_reference[name]):
            series.append(Series(REFERENCES[name], by_reference[name], look))
    if others:
        errors_of_other = {
            layer.layer: layer.relative_error for layer in others
        }
        values = [errors_of_other.get(place) for place in places]
        series.append(Series("the other model", values, _OTHER_LOOK))
    columns = [(whose, series[0].values)]
    columns += [
        (REFERENCES[name], values)
        for name, values in by_reference.items()
        if any(value is not None for value in values)
    ]
    if others:
        columns.append(("the other model", series[-1].values))
    return Figure(
        "What each layer loses",
        "Squared error of the layer's output over its energy, on "
        f"{report.layers_measured_on}; lower is better. Logarithmic.",
        charts.lines("error by layer", places, series, log=True),
        _columns_table(places, columns),
        series,
    )


def _router_figure(layers: list[LayerReport]) -> Figure:
    places = [layer.layer for layer in layers]
    series = [
        Series("energy in what runs", [layer.mass_kept for layer in layers], 0),
        Series(
            "the same with an oracle",
            [layer.oracle_mass for layer in layers],
            3,
        ),
        Series("router recall", [layer.router_recall for layer in layers], 2),
    ]
    columns = [(one.name, one.values) for one in series]
    return Figure(
        "How well the router chooses",
        "Share of all units' output energy in those that ran, the same where an oracle "
        "chooses as many for every token, and the share of the oracle's choice that the "
        "router picks too.",
        charts.lines("router quality by layer", places, series),
        _columns_table(places, columns),
        series,
    )


def _columns_table(
    places: Sequence[int],
    columns: Sequence[tuple[str, Sequence[float | None]]],
) -> Table:
    heads = ["layer", *(name for name, _ in columns)]
    rows = []
    for number, place in enumerate(places):
        cells = [str(place)]
        for _, values in columns:
            value = values[number]
            cells.append(NOTHING if value is None else short(value))
        rows.append(cells)
    return Table(heads, rows)


def layer_notes(record: Record) -> list[str]:
    """What the conversion remarked, each remark once with its layers."""
    if record.report is None:
        return []
    layers_of: dict[str, list[str]] = {}
    for layer in record.report.layers:
        for note in layer.notes:
            layers_of.setdefault(note, []).append(str(layer.layer))
    return [
        f"{'layer' if len(numbers) == 1 else 'layers'} {', '.join(numbers)}: {note}"
        for note, numbers in layers_of.items()
    ]


# --- loads and rates -------------------------------------------------------------------


def load_figures(ours: Inspected, other: Inspected | None) -> list[Figure]:
    """Loads and activation rates; with another model its own beside each."""
    models = [("this model", ours)]
    if other is not None:
        models.append(("the other model", other))
    figures = []
    for figure_of in (_heat_figure, _rates_figure):
        for whose, inspected in models:
            figure = figure_of(inspected)
            if figure is None:
                continue
            if other is not None:
                figure = replace(figure, title=f"{figure.title}: {whose}")
            figures.append(figure)
    return figures


def _heat_figure(inspected: Inspected) -> Figure | None:
    """Who runs how often: of the conversion's own tokens, or of those watched now."""
    passed = inspected.passed
    if passed is None:
        return None
    loads = {layer.layer: layer.rates for layer in passed.layers if layer.rates}
    where = f"{passed.measured:,} tokens of {passed.text}"
    report = inspected.record.report
    if report is not None and inspected.record.recovery is None:
        of_report = {
            layer.layer: layer.expert_load
            for layer in report.layers
            if layer.expert_load
        }
        # Of a mixture only the converted experts are in it, without their numbers.
        in_mixture = any(layer.experts for layer in report.layers)
        if of_report and not in_mixture:
            loads = of_report
            where = f"{report.layers[0].tokens:,} {report.layers_measured_on}"
    if not loads:
        return None
    names = {layer.layer: layer.names for layer in passed.layers}
    unit = next(layer.unit for layer in passed.layers if layer.unit) or "unit"
    rows = [
        (layer, _cells(rates, names.get(layer, []), unit))
        for layer, rates in loads.items()
    ]
    shares = [share for _, cells in rows for _, share in cells]
    low, high = min(shares), max(shares)
    if high - low < 0.02:
        low = max(0.0, high - 0.02)
    named = any(names.values())
    if named:
        title = "How much each linear layer reads"
        caption = (
            f"Share of its inputs that a linear layer reads, mean over {where}. "
            f"From the left: {', '.join(next(filter(None, names.values())))}."
        )
    else:
        title = f"How often each {unit} runs"
        caption = (
            f"Share of tokens that run it, busiest first; {where}. Rows of one shade: all "
            f"{unit}s are used alike. Dark left and pale right: a few do most of the work."
        )
        if max(map(len, loads.values())) > _HEAT_COLUMNS:
            caption += (
                f" A cell is the mean of neighbours: too many {unit}s to show."
            )
    listed = []
    for layer, cells in rows:
        words = [f"{name}: {100 * share:.1f} %" for name, share in cells]
        listed.append([str(layer), ", ".join(words)])
    return Figure(
        title,
        caption,
        charts.heat(title, rows, low, high),
        Table(["layer", "shares"], listed),
        scale=(percent(low), percent(high)),
    )


def _cells(
    rates: list[float], names: list[str], unit: str
) -> list[tuple[str, float]]:
    """Cells of a row: units by name, or by falling share, joined where they are many."""
    if names:
        return list(zip(names, rates, strict=True))
    order = sorted(range(len(rates)), key=lambda number: -rates[number])
    if len(rates) <= _HEAT_COLUMNS:
        return [(f"{unit} {number}", rates[number]) for number in order]
    cells = []
    for place in range(_HEAT_COLUMNS):
        first = place * len(rates) // _HEAT_COLUMNS
        last = (place + 1) * len(rates) // _HEAT_COLUMNS
        joined = [rates[number] for number in order[first:last]]
        words = f"{unit}s of ranks {first + 1} to {last}"
        cells.append((words, statistics.mean(joined)))
    return cells


def _rates_figure(inspected: Inspected) -> Figure | None:
    """How many neurons are how often among a token's largest, over all layers."""
    passed = inspected.passed
    if passed is None:
        return None
    known = [
        layer.neuron_rates for layer in passed.layers if layer.neuron_rates
    ]
    if not known:
        return None
    counts = [sum(column) for column in zip(*known, strict=True)]
    width = 100 * HIGHEST_RATE / RATE_BINS
    names = [
        f"{width * number:.0f} % to {width * (number + 1):.0f} %"
        for number in range(RATE_BINS)
    ]
    names.append(f"{100 * HIGHEST_RATE:.0f} % and more")
    table = Table(
        ["rate", "neurons"],
        [
            [name, f"{count:,}"]
            for name, count in zip(names, counts, strict=True)
        ],
    )
    return Figure(
        "How often neurons are active",
        "Activation rate: share of tokens for which a neuron's hidden state "
        f"is among the ten largest of its layer. All layers, {passed.measured:,} tokens of "
        f"{passed.text}; the height is logarithmic. Few neurons far on the right are "
        "what a shared expert is for; many on the left are what can be skipped.",
        charts.bars(
            "activation rates", counts, names, "neurons", "activation rate, %"
        ),
        table,
    )
