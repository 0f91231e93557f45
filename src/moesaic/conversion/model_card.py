"""The card of a converted model: what it is, how it was made, what it lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moesaic.conversion.report import ConversionReport
from moesaic.evaluate.perplexity import skips_nothing
from moesaic.methods.contents import METHODS
from moesaic.modeling import MoEConfig
from moesaic.output.model_card import (
    Licence,
    Row,
    build_card,
    code,
    front_matter,
    licence_row,
)

_STOCK_USE = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH_TO_THIS_FOLDER")
tokenizer = AutoTokenizer.from_pretrained("PATH_TO_THIS_FOLDER")"""
_OUR_USE = f"import moesaic\n{_STOCK_USE}"
_OUR_WAY = "Use, with moesaic installed (or with `trust_remote_code=True` and no moesaic):"


def model_card(
    report: ConversionReport,
    moe: MoEConfig,
    licence: Licence,
    command: str,
    recovery: Sequence[Row] = (),
) -> str:
    """README.md of a converted model; `recovery` says how it was trained afterwards."""
    base = moe.base_model
    alone = moe.first_sizes.expert == 1
    ordinary = moe.is_ordinary
    title = f"{Path(base).name}, {report.layout}"
    method = _method(moe.name)
    trained = "without training"
    if recovery:
        trained = "then recovered by light fine-tuning"
    summary = f"{base} {_what(moe, alone)}, {trained}.{method}"
    sections = ["Command:", code(command)]
    if ordinary:
        sections += ["Use, with transformers alone:", code(_STOCK_USE)]
    else:
        sections += [_OUR_WAY, code(_OUR_USE)]
    sections.append(f"{_measured(moe, alone)} in `moesaic_report.json`.")
    if recovery:
        sections.append(
            "The training is in `moesaic_finetune.json` and `learning_curve.csv`."
        )
    routed = moe.router is not None
    front = front_matter(licence, base, routed=routed)
    rows = [*_rows(report, moe, licence), *recovery]
    return build_card(front, title, summary, rows, sections)


def _what(moe: MoEConfig, alone: bool) -> str:
    """What became of the model; `alone`: each of its neurons is an expert."""
    if moe.changes is not None:
        return "made smaller by moesaic"
    if moe.linears is not None and moe.layers:
        return (
            "converted by moesaic, and then with linear layers made ones that skip "
            "inputs"
        )
    if moe.linears is not None:
        return "with linear layers made ones that skip inputs by moesaic"
    if alone:
        return (
            "with every dense feed-forward network made one whose neurons are chosen "
            "for each token by moesaic"
        )
    if moe.router is None and moe.outer is not None:
        return (
            f"with every one of its {moe.outer.num_experts} experts a layer pruned by "
            "moesaic"
        )
    if moe.router is None:
        return "with every dense feed-forward network pruned by moesaic"
    if moe.outer is not None:
        return (
            f"with every one of its {moe.outer.num_experts} experts a layer cut into "
            "shared and routed sub-experts by moesaic"
        )
    return (
        "with every dense feed-forward network cut into shared and routed experts by "
        "moesaic"
    )


def _measured(moe: MoEConfig, alone: bool) -> str:
    """What the report holds besides."""
    if moe.changes is not None:
        return "What was done and measured stands"
    if moe.linears is not None or moe.router is None:
        return "Per-layer reconstruction error is"
    if alone:
        return "Per-layer reconstruction error and router recall are"
    return "Per-layer reconstruction error, router recall and expert load are"


def _method(name: str) -> str:
    """The method's paper, where it has one."""
    known = METHODS.get(name)
    if known is None or known.paper is None:
        return ""
    return f" Method: {known.paper}, {known.url}."


def _rows(
    report: ConversionReport, moe: MoEConfig, licence: Licence
) -> list[Row]:
    method = moe.method
    base = moe.base_model
    if moe.source is not None:
        base = f"{base}, {moe.source}"
    macs = report.macs / 1e6
    dense_macs = report.dense_macs / 1e6
    work = f"{macs:.4g} M (dense {dense_macs:.4g} M)"
    megabytes = report.bytes / 1e6
    dense_megabytes = report.dense_bytes / 1e6
    read = f"{megabytes:.4g} MB (dense {dense_megabytes:.4g} MB)"
    text = f"{report.calibration}, {report.tokens} tokens, seed {report.seed}"
    versions = [f"{name} {version}" for name, version in moe.versions.items()]
    return [
        ("Base model", base),
        licence_row(licence),
        ("Method", f"`{method['name']}`: {method['about']}"),
        ("Layout", f"{report.layout}: {report.shape}"),
        ("Active FFN neurons", f"{report.active_ffn_fraction:.1%} per token"),
        ("Multiply-accumulates per token", work),
        ("Weights read for one token", read),
        ("Calibration", text),
        ("Perplexity", _perplexity(report, moe)),
        ("Made with", ", ".join(versions)),
    ]


def _perplexity(report: ConversionReport, moe: MoEConfig) -> str:
    if skips_nothing(moe, report.sequence_length):
        return (
            f"not measured: windows of {report.sequence_length} tokens are all prompt, "
            "over which every neuron runs"
        )
    if not report.perplexity or not report.dense_perplexity:
        return "not measured: the calibration text left nothing to hold out"
    ratio = report.perplexity / report.dense_perplexity
    return (
        f"{report.perplexity:.3f}, dense {report.dense_perplexity:.3f}, ratio {ratio:.3f} "
        f"({report.heldout}, {report.heldout_tokens} tokens predicted, "
        f"windows of {report.sequence_length})"
    )
