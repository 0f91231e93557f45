"""Converts a dense model: checks, chooses a layout, converts layer by layer, writes."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from moesaic.calibration.checks import (
    blame_a_layer,
    check_vocabulary,
    check_weights,
)
from moesaic.calibration.hidden_states import Stream, check_stream
from moesaic.conversion.layer_budgets import share_budgets
from moesaic.conversion.layer_error import LayerReport
from moesaic.conversion.layout_search import (
    HELDOUT_TOKENS,
    Search,
    check_target,
    search_plan,
)
from moesaic.conversion.model_card import model_card
from moesaic.conversion.options import ConvertOptions, make_options
from moesaic.conversion.plan import Plan
from moesaic.conversion.prepare import Prepared, prepare, source_name
from moesaic.conversion.report import ConversionReport
from moesaic.conversion.run import Run
from moesaic.errors import MoesaicError
from moesaic.evaluate.perplexity import perplexity
from moesaic.evaluate.work import active_ffn_fraction
from moesaic.families import FFNs, find_ffns
from moesaic.families.load import (
    choose_device,
    load_model,
    resolve,
    source_of,
)
from moesaic.layout import Layout
from moesaic.methods.base import Method
from moesaic.modeling import MoEConfig, MoesaicReplacement
from moesaic.output import draft as drafts
from moesaic.output.model_card import licence_of


def convert(
    model: Any,
    recipe: str | Path | Method = "moesaic",
    layout: str | Layout | None = None,
    calibration: Any = "wikitext2",
    *,
    settings: Mapping[str, object] | None = None,
    sparsity: float | None = None,
    target_ratio: float | None = None,
    grain: str = "medium",
    tokenizer: Any = None,
    output: str | Path | None = None,
    samples: int | None = None,
    sequence_length: int | None = None,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "auto",
    overwrite: bool = False,
    resume: bool = False,
    trust_remote_code: bool = False,
    experts: Sequence[int] | None = None,
    min_tokens: int | None = None,
    dense_layers: Sequence[int] = (),
    command: str | None = None,
    progress: bool = False,
) -> tuple[Any, ConversionReport]:
    """Turns a dense causal language model into a mixture of experts, without training.

    `model` is a hub id, a folder, a GGUF file, `demo`, or a model in memory, which is
    changed in place, in the dtype and on the device it has: its FFNs are replaced, its
    class becomes MoesaicForCausalLM, in evaluation mode. (Load it again after an error:
    its first layers may be converted.) `recipe` is a method: its name (`moesaic
    methods`), a file, or a Method; `settings` are its fields. `calibration` is a SOURCE
    (see `moesaic.calibration.text.read_documents`), a list of strings, a
    `datasets.Dataset`, or token ids: one row, from which `samples` windows of
    `sequence_length` are drawn, or a matrix of windows. Without a `layout`, a share
    `sparsity` of the FFN neurons (0.25 unless given) is skipped, by the layout of that
    `grain` (coarse, medium, fine) with the least held-out error of a few layers;
    `target_ratio` skips as many as keep perplexity within that ratio of dense. In a
    model that is a mixture already, every expert is converted by itself, on the tokens
    that its router sends there (Section 4.4); a layout is of each expert. `experts`
    names those to convert; ones that see fewer than `min_tokens` (unless said, as many
    as an expert has neurons) stay whole, and the report names them. `dense_layers` stay
    as they are. `output` writes the model folder, layer by layer and resumable, and
    measures perplexity before and after on held-out text.

    Returns the converted model and its report. Raises MoesaicError for any bad input
    and leaves nothing on the disk then. Time: the layers take two (cmoe) to three and a
    half (moesaic) forward passes over the calibration tokens; loading, the choice of a
    layout and the two perplexities come on top. Memory: the dense weights, two FFNs
    more, the inputs of one layer and its FFN for all tokens, and what a method's
    statistics take (docs/architecture.md).
    """
    options = make_options(
        model,
        recipe,
        layout,
        calibration,
        settings=settings,
        sparsity=sparsity,
        target_ratio=target_ratio,
        grain=grain,
        tokenizer=tokenizer,
        output=output,
        samples=samples,
        sequence_length=sequence_length,
        seed=seed,
        device=device,
        dtype=dtype,
        overwrite=overwrite,
        resume=resume,
        trust_remote_code=trust_remote_code,
        experts=experts,
        min_tokens=min_tokens,
        dense_layers=dense_layers,
        command=command,
        progress=progress,
    )
    return run_conversion(options)


def dry_run(
    model: Any, recipe: Any, layout: Any, calibration: Any, **others: Any
) -> Prepared:
    """Checks all that `convert` is given, and writes nothing."""
    options = make_options(model, recipe, layout, calibration, **others)
    prepared = prepare(options)
    check_target(options, prepared.validation)
    return prepared


def run_conversion(options: ConvertOptions) -> tuple[Any, ConversionReport]:
    """Prepare, load, check, choose a plan, share budgets, convert, measure, write."""
    started = time.perf_counter()
    prepared = prepare(options)
    check_target(options, prepared.validation)
    conversion = _begin(options, prepared)
    if options.output is None:
        conversion.convert(None)
    else:
        conversion.write(options.output)
    report = conversion.report
    report.seconds = time.perf_counter() - started
    return conversion.dense, report


def _begin(options: ConvertOptions, prepared: Prepared) -> _Conversion:
    """Loads the model, finds its FFNs, checks both, and chooses the plan."""
    if options.in_memory and (options.dtype, options.device) != (
        "auto",
        "auto",
    ):
        raise MoesaicError(
            "a model in memory keeps its dtype and device; move it before the call"
        )
    device = _device_of(options)
    dense = _load(options, device)
    ffns = replace(find_ffns(dense), kept=options.scope.dense_layers)
    check_vocabulary(dense, prepared.windows_NL)
    digest = check_weights(ffns, dense)
    check_stream(ffns, prepared.windows_NL)
    search = search_plan(dense, ffns, prepared, device)
    dtype = str(dense.dtype).removeprefix("torch.")
    moe = replace(
        search.plan.moe,
        calibration=_calibration_of(prepared),
        source=source_of(options.model),
    )
    plan = search.plan.with_moe(moe)
    report = _new_report(prepared, plan, search)
    return _Conversion(
        prepared, dense, ffns, device, plan, report, digest, dtype
    )


def _device_of(options: ConvertOptions) -> torch.device:
    if options.in_memory:
        return torch.device(options.model.device)
    return choose_device(options.device)


def _load(options: ConvertOptions, device: torch.device) -> Any:
    """The dense model in evaluation mode, on the device where it fits there."""
    if options.in_memory:
        dense = options.model
    else:
        dense = load_model(
            options.model, options.dtype, options.trust_remote_code
        )
    if any(parameter.is_meta for parameter in dense.parameters()):
        raise MoesaicError(
            f"{options.model_name} has weights that are not in memory; pass its folder "
            "instead"
        )
    dense.eval()
    if not options.in_memory and _fits(dense, device):
        dense.to(device)
    return dense


def _fits(model: Any, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    needed = sum(parameter.nbytes for parameter in model.parameters())
    return bool(needed < 0.7 * free)


def _calibration_of(prepared: Prepared) -> dict[str, Any]:
    """What the configuration keeps of the calibration."""
    return {
        "source": source_name(prepared.options.calibration),
        "tokens": prepared.calibration.tokens,
        "sequence_length": prepared.calibration.length,
        "seed": prepared.options.seed,
    }


def _new_report(
    prepared: Prepared, plan: Plan, search: Search
) -> ConversionReport:
    calibration = _calibration_of(prepared)
    return ConversionReport(
        model=plan.model,
        method=plan.method.to_dict(),
        layout=plan.label,
        shape=plan.words,
        calibration=calibration["source"],
        tokens=calibration["tokens"],
        sequence_length=calibration["sequence_length"],
        seed=calibration["seed"],
        active_ffn_fraction=active_ffn_fraction(plan.config),
        dense_macs=plan.dense_macs.total,
        macs=plan.macs.total,
        search=search.tried,
        unit="neurons" if plan.sizes.expert == 1 else "experts",
    )


@dataclass
class _Conversion:
    """A conversion under way: the model, its plan, and what is reported of it."""

    prepared: Prepared
    dense: Any
    ffns: FFNs
    device: torch.device
    plan: Plan
    report: ConversionReport
    digest: str  # of the dense weights
    dtype: str

    @property
    def options(self) -> ConvertOptions:
        return self.prepared.options

    def convert(self, draft: Path | None) -> None:
        """Shares budgets, converts every layer, and makes the model one of ours."""
        self._share_budgets(draft)
        stream = Stream(self.ffns, self.prepared.windows_NL, self.device)
        run = Run(
            stream,
            self.plan,
            self.prepared.calibration,
            self.options.seed,
            self.report.step_seconds,
            draft,
            self.options.progress,
        )
        self.report.layers = self.plan.method.convert(
            self.dense, self.prepared.calibration, self.plan, run
        )
        self._settle()
        become_ours(self.dense, self._final_config())

    def write(self, output: Path) -> None:
        """The same into a folder, with perplexities before and after."""
        needed = sum(parameter.nbytes for parameter in self.dense.parameters())
        drafts.check_space(output, needed)
        self._measure_dense()
        with drafts.open_draft(
            output, self._fingerprint(), self.options.resume
        ) as draft:
            self.convert(draft)
            self.report.perplexity = self._perplexity()
            files = self._files()
            drafts.finish(
                draft, output, self.dense, self.prepared.tokenizer, files
            )

    def _share_budgets(self, draft: Path | None) -> None:
        """Budgets of layers: those that an earlier run came to, if it did."""
        saved = _saved_budgets(draft)
        if saved is not None:
            self.plan = self.plan.with_moe(self.plan.moe.with_budgets(saved))
            return
        tell = Console(stderr=True, quiet=not self.options.progress).print
        shares = (
            getattr(self.plan.method, "layer_budgets", "uniform") != "uniform"
        )
        if not shares:
            return
        if self.options.target_ratio is not None:
            tell("layers keep equal budgets, with which the target was met")
            return
        self.plan = share_budgets(
            self.dense,
            self.ffns,
            self.plan,
            self.prepared.calibration,
            self.device,
            self.options.seed,
            tell,
        )
        _save_budgets(draft, self.plan)

    def _settle(self) -> None:
        """What is known in the end only: budgets, and experts that stay whole."""
        moe = reduce(_with_whole, self.report.layers, self.plan.moe)
        self.plan = self.plan.with_moe(moe)
        self.report.shape = self.plan.words
        self.report.budgets = moe.budgets
        self.report.macs = self.plan.macs.total
        self.report.active_ffn_fraction = active_ffn_fraction(self.plan.config)

    def _final_config(self) -> Any:
        config = self.plan.config
        config.dtype = self.dtype
        return config

    def _measure_dense(self) -> None:
        validation = self.prepared.validation
        if validation is None:
            return
        self.report.heldout = validation.name
        try:
            self.report.dense_perplexity, self.report.heldout_tokens = (
                perplexity(
                    self.dense,
                    validation.ids,
                    self.prepared.length,
                    HELDOUT_TOKENS,
                )
            )
        except MoesaicError:
            blame_a_layer(
                Stream(self.ffns, self.prepared.windows_NL, self.device)
            )
            raise

    def _perplexity(self) -> float | None:
        validation = self.prepared.validation
        if validation is None:
            return None
        value, _ = perplexity(
            self.dense, validation.ids, self.prepared.length, HELDOUT_TOKENS
        )
        return value

    def _files(self) -> dict[str, str]:
        """Card and report, by their names."""
        licence = None
        if not self.options.in_memory:
            licence = licence_of(resolve(self.options.model))
        name, layout = self.plan.method.name, self.plan.label
        call = f"moesaic.convert({self.plan.model!r}, {name!r}, {layout!r})"
        command = self.options.command or call
        report = json.dumps(self.report.to_dict(timing=False), indent=2)
        return {
            "README.md": model_card(
                self.report, self.plan.moe, licence, command
            ),
            "moesaic_report.json": report + "\n",
        }

    def _fingerprint(self) -> dict[str, Any]:
        """What must be equal for finished layers to be worth keeping."""
        moe = self.plan.moe
        windows = self.prepared.windows_NL.numpy().tobytes()
        outer = None
        if moe.outer is not None:
            outer = {
                "experts": moe.outer.chosen,
                "min_tokens": moe.outer.min_tokens,
            }
        run = {
            "model": self.plan.model,
            "weights": self.digest,
            "method": self.plan.method.to_dict(),
            "layout": moe.layout,
            "experts": outer,
            "layers": moe.layers,
            "seed": self.options.seed,
            "dtype": self.dtype,
            "device": self.device.type,
            "calibration tokens": hashlib.sha256(windows).hexdigest(),
            "versions": moe.versions | {"POT": version("POT")},
        }
        as_read: dict[str, Any] = json.loads(json.dumps(run))
        return as_read


def _with_whole(moe: MoEConfig, report: LayerReport) -> MoEConfig:
    return moe.with_whole(report.layer, report.whole_experts)


def _saved_budgets(draft: Path | None) -> tuple[int, ...] | None:
    if draft is None or not (draft / "budgets.json").is_file():
        return None
    return tuple(json.loads((draft / "budgets.json").read_text("utf-8")))


def _save_budgets(draft: Path | None, plan: Plan) -> None:
    if draft is None:
        return
    budgets = [sizes.num_active for sizes in plan.moe.sizes]
    part = draft / "budgets.part"
    part.write_text(json.dumps(budgets), "utf-8")
    part.replace(draft / "budgets.json")


def become_ours(dense: Any, config: Any) -> None:
    """The dense model object, its FFNs replaced, becomes what loading would give."""
    from transformers import AutoModelForCausalLM

    previous = dense.config
    config._attn_implementation = previous._attn_implementation
    dense.__class__ = AutoModelForCausalLM._model_mapping[type(config)]
    for module in dense.modules():
        if getattr(module, "config", None) is previous:
            module.config = config
        if isinstance(module, MoesaicReplacement):
            module.set_config(config)
