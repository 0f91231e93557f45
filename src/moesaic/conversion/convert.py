"""Converts a dense model: checks, chooses a layout, converts layer by layer, writes.

The public `moesaic.convert` is in finetune/convert.py, since recovery may follow.
"""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from moesaic.calibration.checks import (
    blame_a_layer,
    check_on,
    check_vocabulary,
    check_weights,
    digest_of_tokens,
)
from moesaic.calibration.hidden_states import Stream, check_stream
from moesaic.calibration.share import (
    Share,
    device_of_process,
    share_of_launch,
)
from moesaic.conversion.layer_budgets import share_budgets
from moesaic.conversion.layout_search import (
    HELDOUT_TOKENS,
    Search,
    check_target,
    search_plan,
    with_equal_layers,
)
from moesaic.conversion.masks import under_masks
from moesaic.conversion.model_card import model_card
from moesaic.conversion.options import ConvertOptions
from moesaic.conversion.plan import Plan, public_name
from moesaic.conversion.prepare import (
    Prepared,
    ValidationText,
    prepare,
    source_name,
)
from moesaic.conversion.python_call import python_call
from moesaic.conversion.report import CONVERSION_FILE, ConversionReport
from moesaic.conversion.run import Run
from moesaic.errors import MoesaicError
from moesaic.evaluate.perplexity import perplexity, skips_nothing
from moesaic.evaluate.work import active_ffn_fraction, count_macs, meta_model
from moesaic.families import FFNs, find_ffns
from moesaic.families.load import (
    choose_device,
    file_beside,
    load_model,
    mend_generation,
)
from moesaic.memory import gathered, is_spread
from moesaic.methods.base import ModelMethod
from moesaic.modeling import MoesaicReplacement, Sizes
from moesaic.output import draft as drafts
from moesaic.output.model_card import CARD_FILE, Licence, licence_of
from moesaic.parts.products import widened_products
from moesaic.progress import step_log


def check_conversion(options: ConvertOptions) -> Prepared:
    """Checks all of a conversion's input but the weights, and reads its text.

    Writes nothing.
    """
    if options.target_ratio is not None:
        options = with_equal_layers(options)
    prepared = prepare(options)
    check_target(prepared)
    return prepared


def convert_prepared(prepared: Prepared) -> tuple[Any, ConversionReport]:
    """Load, check, choose a plan, share budgets, convert, measure, write."""
    started = time.perf_counter()
    options = prepared.options
    device = _device_of(options)
    share = share_of_launch(device)
    dense = _load(options)
    with gathered(dense), widened_products(dense.dtype, device):
        _place(dense, options, device)
        conversion = _begin(prepared, dense, device, share)
        if conversion.share.processes > 1:
            conversion.share.check_same(conversion.identity())
        if options.output is None:
            conversion.convert(None)
        else:
            conversion.write(options.output)
    report = conversion.report
    report.seconds = time.perf_counter() - started
    return conversion.dense, report


def _begin(
    prepared: Prepared, dense: Any, device: torch.device, share: Share
) -> _Conversion:
    """Finds the model's FFNs, checks both, and chooses the plan."""
    options = prepared.options
    ffns = replace(find_ffns(dense), unconverted=options.scope.dense_layers)
    check_vocabulary(dense, prepared.windows_NL)
    digest = check_weights(ffns, dense)
    check_stream(ffns, prepared.windows_NL)
    if "gradients" in options.method.needs:
        check_on(
            dense, device, f"method {options.method.name!r} differentiates"
        )
    search = search_plan(dense, ffns, prepared, device, share)
    dtype = str(dense.dtype).removeprefix("torch.")
    moe = replace(
        search.plan.moe,
        calibration=_calibration_of(prepared),
        source=prepared.source,
    )
    plan = search.plan.with_moe(moe)
    report = _new_report(prepared, plan, search)
    return _Conversion(
        prepared, dense, ffns, device, share, plan, report, digest, dtype
    )


def _device_of(options: ConvertOptions) -> torch.device:
    usual_place = options.dtype == "auto" and options.device == "auto"
    if options.in_memory and not usual_place:
        raise MoesaicError(
            "a model in memory keeps its dtype and device; move it before the call"
        )
    if options.in_memory:
        return torch.device(options.model.device)
    return device_of_process(choose_device(options.device))


def _load(options: ConvertOptions) -> Any:
    """The dense model in evaluation mode."""
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
    mend_generation(dense, options.model_name)
    dense.eval()
    return dense


def _place(dense: Any, options: ConvertOptions, device: torch.device) -> None:
    """Moves the model to the device where it fits there; else layers go one by one."""
    stays = options.in_memory and not is_spread(dense)
    if not stays and _fits(dense, device):
        dense.to(device)


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
        dense_bytes=plan.dense_bytes.total,
        bytes=plan.bytes.total,
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
    share: Share
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
        calibration = self.prepared.calibration
        method = self.plan.method
        part = calibration.part(self.share, method.fits_weights)
        stream = Stream(self.ffns, calibration.windows_NL, self.device, part)
        run = Run(
            stream,
            self.plan,
            calibration,
            seed=self.options.seed,
            seconds=self.report.step_seconds,
            draft=draft,
            progress=self.options.progress,
        )
        if (
            isinstance(method, ModelMethod)
            and self.report.dense_perplexity is None
        ):
            # Nothing else would tell: it looks at no layer by itself.
            blame_a_layer(
                Stream(self.ffns, calibration.windows_NL, self.device)
            )
        self.report.layers = method.convert(
            self.dense, calibration, self.plan, run
        )
        self._settle()
        if self.plan.is_ordinary:
            stay_ordinary(self.dense, self.plan, self.dtype)
        else:
            become_ours(self.dense, self._final_config())

    def write(self, output: Path) -> None:
        """The same into a folder, with perplexities before and after.

        Of several processes the first writes it.
        """
        if self.share.is_first:
            drafts.check_space(output, self.plan.stored_bytes(self.dense.dtype))
        self._measure_dense()
        with self._draft(output) as draft:
            self.convert(draft)
            self.report.perplexity = self._perplexity()
            if draft is not None:
                files = self._files()
                tokenizer = self.prepared.tokenizer
                drafts.finish(
                    draft,
                    output,
                    self.dense,
                    tokenizer,
                    files,
                    self.options.overwrite,
                )
        if not self.plan.is_ordinary:
            self.dense.name_or_path = str(output)

    def _draft(self, output: Path) -> AbstractContextManager[Path | None]:
        """The folder to work in; of several processes the first has it."""
        if not self.share.is_first:
            return nullcontext()
        identity = self.identity()
        options = self.options
        return drafts.open_draft(
            output, identity, options.resume, options.progress
        )

    def _share_budgets(self, draft: Path | None) -> None:
        """Budgets of layers: those that an earlier run came to, if it did."""
        strategy = getattr(self.plan.method, "layer_budgets", "uniform")
        if strategy == "uniform":
            return
        log = step_log(self.options.progress)

        def shared() -> dict[str, Any]:
            plan = share_budgets(
                self.dense,
                self.ffns,
                self.plan,
                self.prepared.calibration,
                self.device,
                self.options.seed,
                log,
                self.share,
            )
            sizes = [asdict(sizes) for sizes in plan.moe.sizes]
            return {
                "layout": plan.moe.layout,
                "layers": list(plan.moe.layers),
                "sizes": sizes,
            }

        found = drafts.remembered(draft, "budgets", shared, self.share)
        moe = replace(
            self.plan.moe,
            layout=found["layout"],
            layers=tuple(found["layers"]),
            sizes=tuple(Sizes(**row) for row in found["sizes"]),
        )
        self.plan = self.plan.with_moe(moe)

    def _settle(self) -> None:
        """What is known in the end only."""
        self.plan = self.plan.settled(self.report.layers)
        self.report.layout = self.plan.label
        self.report.shape = self.plan.words
        self.report.budgets = self.plan.moe.budgets
        self.report.macs = self.plan.macs.total
        self.report.bytes = self.plan.bytes.total
        self.report.active_ffn_fraction = active_ffn_fraction(self.plan.config)

    def _final_config(self) -> Any:
        config = self.plan.config
        config.dtype = self.dtype
        return config

    def _measure_dense(self) -> None:
        validation = self._measured_text()
        if self.prepared.validation is not validation:
            log = step_log(self.options.progress)
            log(
                f"no perplexity: windows of {self.prepared.length} tokens are all prompt, "
                "over which every neuron runs"
            )
        if validation is None:
            return
        self.report.heldout = validation.name
        try:
            value, tokens = self._score(validation)
        except MoesaicError:
            windows_NL = self.prepared.windows_NL
            # Where the model was scored, which may be no device that it fits on.
            stream = Stream(self.ffns, windows_NL, self.dense.device)
            blame_a_layer(stream)
            raise
        self.report.dense_perplexity = value
        self.report.heldout_tokens = tokens

    def _measured_text(self) -> ValidationText | None:
        """The held-out text; None where its windows would show nothing skipped, too."""
        if skips_nothing(self.plan.moe, self.prepared.length):
            return None
        return self.prepared.validation

    def _perplexity(self) -> float | None:
        validation = self._measured_text()
        if validation is None:
            return None
        with under_masks(self.dense):
            value, _ = self._score(validation)
        return value

    def _score(self, validation: ValidationText) -> tuple[float, int]:
        """The model's perplexity as it is now, and the tokens it is of."""
        return perplexity(
            self.dense,
            validation.ids,
            self.prepared.length,
            HELDOUT_TOKENS,
            share=self.share,
        )

    def _files(self) -> dict[str, str]:
        """Card and report, by their names."""
        licence: Licence = {}
        if not self.options.in_memory:
            licence = licence_of(file_beside(self.options.model, CARD_FILE))
        command = self.options.command or python_call(
            self.options, public_name(self.plan.model)
        )
        card = model_card(self.report, self.plan.moe, licence, command)
        values = self.report.to_dict(timing=False)
        report = json.dumps(values, indent=2) + "\n"
        return {"README.md": card, CONVERSION_FILE: report}

    def identity(self) -> dict[str, Any]:
        """What must be equal for finished layers to be worth keeping."""
        moe = self.plan.moe
        experts = None
        if moe.outer is not None:
            experts = {
                "experts": moe.outer.chosen,
                "min_tokens": moe.outer.min_tokens,
            }
        identity = {
            "model": self.plan.model,
            "weights": self.digest,
            "configuration": digest_of_config(self.plan.dense_config),
            "method": self.plan.method.to_dict(),
            "layout": moe.layout,
            "sparsity": self.options.budget.skipped,
            "experts": experts,
            "layers": moe.layers,
            "seed": self.options.seed,
            "dtype": self.dtype,
            "device": self.device.type,
            "calibration tokens": digest_of_tokens(self.prepared.windows_NL),
            "versions": moe.versions | {"POT": version("POT")},
        }
        # As it will be read: tuples become lists.
        text = json.dumps(identity)
        as_read: dict[str, Any] = json.loads(text)
        return as_read


def digest_of_config(config: Any) -> str:
    """Of what a dense configuration says of the model, and not of where it was read."""
    values = config.to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype"):
        values.pop(name, None)
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def stay_ordinary(model: Any, plan: Plan, dtype: str) -> None:
    """The configuration says how the model was made; it must hold what the model is.

    Raises MoesaicError for a method that did other than it planned.
    """
    config = model.config
    expected = {}
    for name, tensor in meta_model(config).state_dict().items():
        expected[name] = tuple(tensor.shape)
    found = {}
    for name, tensor in model.state_dict().items():
        found[name] = tuple(tensor.shape)
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise MoesaicError(
                f"method {plan.method.name!r} left {name} of shape {found.get(name)}, "
                f"and its configuration says {expected.get(name)}; mend the method"
            )
    macs = count_macs(model, 1).total
    if macs != plan.macs.total:
        raise MoesaicError(
            f"method {plan.method.name!r} left {macs:,.0f} multiply-accumulates a "
            f"token, and planned {plan.macs.total:,.0f}; mend the method"
        )
    config.dtype = dtype
    config.moesaic_conversion = plan.moe.provenance()


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
    # Else PEFT takes the dense model for what an adapter is made for.
    dense.name_or_path = ""
