"""The page: what is drawn and tabled of an inspection, and the template that holds it."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from moesaic._version import __version__
from moesaic.conversion.layer_error import LayerReport
from moesaic.inspection import charts
from moesaic.inspection.answers import mean_reference, percent
from moesaic.inspection.charts import Series, short
from moesaic.inspection.measure import HIGHEST_RATE, RATE_BINS, Pass
from moesaic.inspection.record import Record

if TYPE_CHECKING:
    from moesaic.inspection.inspect import Inspected, Inspection

NOTHING = "-"
_HEAT_COLUMNS = 64
# References of a layer: their names, and the looks of those that are drawn.
_REFERENCES = {
    "static": "static pruning",
    "static-repaired": "static pruning, repaired",
    "random": "random neurons",
    "unrepaired": "without its repair",
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


@dataclass(frozen=True)
class Bar:
    """A length beside others, as a share of the longest."""

    name: str
    value: str
    share: float
    own: bool


@dataclass(frozen=True)
class Bars:
    title: str
    caption: str
    bars: list[Bar]


@dataclass(frozen=True)
class Card:
    """A number that is seen first."""

    value: str
    name: str
    note: str


def draw(inspection: Inspection) -> str:
    """The page as HTML. Loads nothing, not even a font. Costs well under a second."""
    environment = Environment(
        loader=PackageLoader("moesaic", "inspection"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # No spaces: the numbers of a page are many.
    environment.filters["options"] = unbroken_options
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    template = environment.get_template("page.html.jinja")
    ours = inspection.model
    other = inspection.against
    return template.render(
        version=__version__,
        record=ours.record,
        answers=ours.answers,
        passed=ours.passed,
        cards=_cards(ours.record, inspection.bench),
        facts=_facts(ours.record),
        quality=_quality(ours.record),
        work=_work(ours.record),
        times=_times(inspection.bench),
        bench=inspection.bench,
        layer_figures=_layer_figures(ours.record, other),
        notes=_notes(ours.record),
        load_figures=_load_figures(ours),
        other=other,
        side=None if other is None else _side_by_side(ours, other),
        tokens=_token_data(inspection),
    )


def unbroken_options(words: str) -> Markup:
    """Marks options of commands, which no line may break."""
    marked = re.sub(
        r"--[a-z][\w-]*",
        r'<span class="option">\g<0></span>',
        str(escape(words)),
    )
    return Markup(marked)


# --- the head --------------------------------------------------------------------------


def _cards(record: Record, bench: dict[str, Any] | None) -> list[Card]:
    cards = []
    ratio = record.ratio
    if ratio is not None:
        cards.append(
            Card(f"{ratio:.3f}", "perplexity", "over dense; 1 is no loss")
        )
    skipped = 1 - record.active_ffn_fraction
    if skipped > 0:
        cards.append(
            Card(percent(skipped), "skipped", "of the FFN neurons, each token")
        )
    report = record.report
    if report is not None:
        macs = change(report.macs / report.dense_macs)
        read = change(report.bytes / report.dense_bytes)
        cards.append(Card(macs, "multiplications", "counted, for one token"))
        cards.append(Card(read, "bytes of weights", "counted, for one token"))
    cards.append(_speed_card(bench))
    return cards


def _speed_card(bench: dict[str, Any] | None) -> Card:
    rows = [] if bench is None else bench["rows"]
    timed = [row for row in rows if "ratio" in row]
    if not timed:
        return Card("?", "time", "not measured")
    best = min(timed, key=lambda row: float(row["ratio"]))
    return Card(
        f"{best['ratio']:.2f}",
        "time",
        f"over dense: {best['kind']}, batch {best['batch']}",
    )


def change(ratio: float) -> str:
    """How much more or less, with a real minus."""
    return f"{100 * (ratio - 1):+.1f} %".replace("-", charts.MINUS)


def _facts(record: Record) -> list[tuple[str, str, str | None]]:
    """What was converted and how: a name, its value, and an address, if any."""
    provenance = record.provenance
    method = provenance["method"]
    base = record.base
    if provenance.get("source"):
        base = f"{base}, {provenance['source']}"
    facts: list[tuple[str, str, str | None]] = [
        ("Dense model", base, None),
        ("Method", f"{method['name']}: {method.get('about', '')}", None),
    ]
    if record.paper is not None:
        words, address = record.paper
        facts.append(("Published as", words, address))
    report = record.report
    shape = record.layout
    if report is not None:
        shape = f"{shape}: {report.shape}" if shape else report.shape
    facts.append(("Layout", shape or NOTHING, None))
    if record.active_ffn_fraction < 1:
        active = f"{record.active_ffn_fraction:.1%} for a token"
        facts.append(("Active FFN neurons", active, None))
    if report is not None and report.budgets:
        budgets = ", ".join(map(str, report.budgets))
        facts.append((f"Active {report.unit} by layer", budgets, None))
    if report is not None and report.search:
        tried = ", ".join(
            f"{name} ({short(value)})" for name, value in report.search.items()
        )
        facts.append(("Layouts tried, with their error", tried, None))
    facts.append(("Settings", _settings(method.get("settings", {})), None))
    facts.append(("Calibration", _calibration(provenance), None))
    if record.recovery is not None:
        facts.append(("Training afterwards", _training(record.recovery), None))
    versions = provenance.get("versions", {})
    made = ", ".join(f"{name} {version}" for name, version in versions.items())
    facts.append(("Made with", made or NOTHING, None))
    return facts


def _settings(settings: dict[str, Any]) -> str:
    return (
        ", ".join(f"{name} = {value}" for name, value in settings.items())
        or NOTHING
    )


def _calibration(provenance: dict[str, Any]) -> str:
    used = provenance.get("calibration")
    if not used:
        return NOTHING
    return (
        f"{used['source']}, {used['tokens']:,} tokens in windows of "
        f"{used['sequence_length']}, seed {used['seed']}"
    )


def _training(recovery: dict[str, Any]) -> str:
    settings = recovery["settings"]
    tokens = settings["samples"] * settings["sequence_length"]
    teacher = "without a teacher"
    if recovery.get("distill"):
        teacher = "with the dense model as teacher"
    return f"{tokens:,} tokens of {recovery.get('data', 'text')}, {teacher}"


# --- quality and speed ------------------------------------------------------------------


def _quality(record: Record) -> list[Bars]:
    """Perplexities, and the mean layer beside its references."""
    found = []
    values = record.perplexities
    if values:
        last = list(values)[-1]
        entries = [
            (name, value, f"{value:.3f}", name == last)
            for name, value in values.items()
        ]
        caption = "how unsure the model is of the next token; lower is better"
        found.append(Bars("Perplexity", caption, _bars(entries)))
    layers = [] if record.report is None else record.report.layers
    if layers:
        own = statistics.mean(layer.relative_error for layer in layers)
        entries = [("this model", own, percent(own), True)]
        for name, words in _REFERENCES.items():
            mean = mean_reference(layers, name)
            if mean is not None:
                entries.append((words, mean, percent(mean), False))
        entries.sort(key=lambda entry: entry[1])
        title = "Layer error"
        caption = (
            "squared error of a layer's output over its energy, on tokens held out, mean "
            "over layers"
        )
        if len(entries) > 1:
            title += ", beside references"
            caption += "; the references spend the same budget"
        found.append(Bars(title, caption, _bars(entries)))
    return found


def _bars(entries: Sequence[tuple[str, float, str, bool]]) -> list[Bar]:
    longest = max(entry[1] for entry in entries) or 1.0
    return [
        Bar(name, words, value / longest, own)
        for name, value, words, own in entries
    ]


def _work(record: Record) -> list[Bars]:
    """Counted work beside the dense model's."""
    report = record.report
    if report is None:
        return []
    found = []
    for title, own, dense, caption in (
        (
            "Multiply-accumulates for one token",
            report.macs,
            report.dense_macs,
            "what a long prompt or a batch waits for",
        ),
        (
            "Bytes of weights read for one token",
            report.bytes,
            report.dense_bytes,
            "what one user, one token at a time, waits for",
        ),
    ):
        entries = [
            ("dense", dense, f"{dense / 1e6:,.1f} M", False),
            ("this model", own, f"{own / 1e6:,.1f} M", True),
        ]
        words = f"{change(own / dense)}, counted; {caption}"
        found.append(Bars(title, words, _bars(entries)))
    return found


def _times(bench: dict[str, Any] | None) -> Table | None:
    """What was measured, a row for each kind of work."""
    if bench is None:
        return None
    heads = ["", "batch", "tokens/s", "dense tokens/s", "time over dense"]
    rows = []
    for row in bench["rows"]:
        speeds = [f"{speed:,.1f}" for speed in row["tokens_per_second"]]
        speeds += [NOTHING] * (2 - len(speeds))
        ratio = NOTHING
        if "ratio" in row:
            ratio = (
                f"{row['ratio']:.2f} ({row['least']:.2f} to {row['most']:.2f})"
            )
        rows.append([str(row["kind"]), str(row["batch"]), *speeds, ratio])
    return Table(heads, rows)


# --- by layer --------------------------------------------------------------------------


def _layer_figures(record: Record, other: Inspected | None) -> list[Figure]:
    layers = [] if record.report is None else record.report.layers
    if not layers:
        return []
    figures = [_error_figure(layers, _layers_of(other))]
    if any(layer.router_recall is not None for layer in layers):
        figures.append(_router_figure(layers))
    return figures


def _layers_of(inspected: Inspected | None) -> list[LayerReport]:
    if inspected is None or inspected.record.report is None:
        return []
    return inspected.record.report.layers


def _error_figure(
    layers: list[LayerReport], others: list[LayerReport]
) -> Figure:
    places = [layer.layer for layer in layers]
    errors = [layer.relative_error for layer in layers]
    series = [Series("this model", errors, 0)]
    by_reference = {
        name: [layer.references.get(name) for layer in layers]
        for name in _REFERENCES
    }
    for name, look in _DRAWN.items():
        if any(value is not None for value in by_reference[name]):
            series.append(Series(_REFERENCES[name], by_reference[name], look))
    if others:
        errors_of_other = {
            layer.layer: layer.relative_error for layer in others
        }
        values = [errors_of_other.get(place) for place in places]
        series.append(Series("the other model", values, _OTHER_LOOK))
    columns = [("this model", series[0].values)]
    columns += [
        (_REFERENCES[name], values)
        for name, values in by_reference.items()
        if any(value is not None for value in values)
    ]
    if others:
        columns.append(("the other model", series[-1].values))
    return Figure(
        "What each layer loses",
        "Squared error of the layer's output over its energy, on tokens held out; lower "
        "is better. Logarithmic.",
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
        "chooses, and the share of the oracle's choice that the router picks too.",
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


def _notes(record: Record) -> list[str]:
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


def _load_figures(inspected: Inspected) -> list[Figure]:
    figures = [_heat_figure(inspected), _rates_figure(inspected.passed)]
    return [figure for figure in figures if figure is not None]


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
        if of_report:
            loads = of_report
            where = (
                f"{report.layers[0].tokens:,} held-out tokens of the "
                "calibration text"
            )
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


def _rates_figure(passed: Pass | None) -> Figure | None:
    """How many neurons are how often among a token's largest, over all layers."""
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


# --- side by side, tokens ---------------------------------------------------------------


def _side_by_side(ours: Inspected, other: Inspected) -> Table:
    """The same facts of two models."""
    own = _summary(ours.record)
    others = _summary(other.record)
    rows = [[name, value, others[name]] for name, value in own.items()]
    heads = ["", "this model", f"the other model ({other.record.model})"]
    return Table(heads, rows)


def _summary(record: Record) -> dict[str, str]:
    report = record.report
    layers = [] if report is None else report.layers
    recalls = [
        layer.router_recall
        for layer in layers
        if layer.router_recall is not None
    ]
    errors = [layer.relative_error for layer in layers]
    values = {
        "dense model": record.base,
        "method": record.method,
        "layout": record.layout or NOTHING,
        "active FFN neurons": f"{record.active_ffn_fraction:.1%}",
        "perplexity over dense": NOTHING,
        "measured on": NOTHING,
        "multiply-accumulates over dense": NOTHING,
        "bytes read over dense": NOTHING,
        "mean layer error": NOTHING,
        "router recall": NOTHING,
        "calibration": _calibration(record.provenance),
        "trained afterwards": NOTHING,
    }
    if record.ratio is not None:
        values["perplexity over dense"] = f"{record.ratio:.3f}"
    if report is not None:
        macs = report.macs / report.dense_macs
        read = report.bytes / report.dense_bytes
        values["multiply-accumulates over dense"] = f"{macs:.3f}"
        values["bytes read over dense"] = f"{read:.3f}"
        values["measured on"] = report.heldout or NOTHING
    if errors:
        values["mean layer error"] = short(statistics.mean(errors))
    if recalls:
        values["router recall"] = f"{statistics.mean(recalls):.3f}"
    if record.recovery is not None:
        values["trained afterwards"] = _training(record.recovery)
    return values


def _token_data(inspection: Inspection) -> list[dict[str, Any]]:
    """What the page's script reads: tokens and cells of each model that was watched."""
    found = []
    for name, inspected in (
        ("this model", inspection.model),
        ("the other model", inspection.against),
    ):
        if inspected is None or inspected.passed is None:
            continue
        passed = inspected.passed
        layers = []
        for layer in passed.layers:
            cells = layer.cells
            layers.append(
                {
                    "layer": layer.layer,
                    "unit": layer.unit,
                    "names": layer.names,
                    "count": len(layer.rates),
                    "ran": cells.ran,
                    "kept": cells.kept,
                    "added": cells.added,
                    "units": cells.units,
                }
            )
        found.append({"name": name, "tokens": passed.tokens, "layers": layers})
    return found
