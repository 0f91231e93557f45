"""The page: what an inspection says in words, tables and bars, and the template that holds it."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from moesaic._version import __version__
from moesaic.inspection import charts
from moesaic.inspection.answers import mean_reference, percent, timed_against
from moesaic.inspection.charts import short
from moesaic.inspection.figures import (
    NOTHING,
    REFERENCES,
    Table,
    layer_figures,
    layer_notes,
    load_figures,
)
from moesaic.inspection.record import Record

if TYPE_CHECKING:
    from moesaic.inspection.inspect import Inspected, Inspection


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
        times=_times(ours.record, inspection.bench),
        bench=inspection.bench,
        layer_figures=layer_figures(ours.record, other),
        notes=layer_notes(ours.record),
        load_figures=load_figures(ours, other),
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
    cards.append(_speed_card(record, bench))
    return cards


def _speed_card(record: Record, bench: dict[str, Any] | None) -> Card:
    rows = [] if bench is None else bench["rows"]
    timed = [row for row in rows if "ratio" in row]
    if bench is None or not timed:
        return Card("?", "time", "not measured")
    other = timed_against(record, bench)
    best = min(timed, key=lambda row: float(row["ratio"]))
    return Card(
        f"{best['ratio']:.2f}",
        "time",
        f"over {other}: {best['kind']}, batch {best['batch']}",
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
        for name, words in REFERENCES.items():
            mean = mean_reference(layers, name)
            if mean is not None:
                entries.append((words, mean, percent(mean), False))
        entries.sort(key=lambda entry: entry[1])
        title = "Layer error"
        assert record.report is not None
        caption = (
            "squared error of a layer's output over its energy, on "
            f"{record.report.layers_measured_on}, mean over layers"
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
    waits = "what a long prompt or a batch waits for"
    if record.prompts_run_all:
        waits = "a prompt runs all neurons instead, as the dense model does"
    for title, own, dense, caption in (
        (
            "Multiply-accumulates for one token",
            report.macs,
            report.dense_macs,
            waits,
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


def _times(record: Record, bench: dict[str, Any] | None) -> Table | None:
    """What was measured, a row for each kind of work."""
    if bench is None:
        return None
    other = timed_against(record, bench)
    own_heads = ["", "batch", "tokens/s"]
    heads = [*own_heads, f"{other} tokens/s", f"time over {other}"]
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
        "layer errors are on": NOTHING,
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
    if report is not None and errors:
        values["layer errors are on"] = report.layers_measured_on
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
