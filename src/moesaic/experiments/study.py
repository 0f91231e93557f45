"""What all tables share: the model, the scale, texts, and models made on the way.

A model is converted, fine-tuned and measured once, whichever tables ask for it; what is
made stays below DIR/models, and what was measured below DIR/measured.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import moesaic
from moesaic.conversion.report import ConversionReport
from moesaic.errors import MoesaicError
from moesaic.evaluate import evaluate
from moesaic.evaluate.tasks import evaluate_tasks
from moesaic.experiments.scales import Scale
from moesaic.experiments.texts import Text
from moesaic.families.load import choose_device
from moesaic.output.atomic import write_file

SPARSITY = 0.25
LAYOUT = "S3A3E8"
# The paper's models that its tables have rows of, by what a name holds.
_PAPER_MODELS = {
    "llama-2-70b": "Llama-2 70B",
    "qwen2.5-7b": "Qwen-2.5-7B",
    "qwen3-30b-a3b": "Qwen-3-30B-A3B",
}
LLAMA = "Llama-2 7B"


@dataclass(frozen=True)
class Study:
    """One model at one scale. `tell` is told of each step.

    `questions` is the digest of what lies in `task_data`, `broken` are rows of the table
    in the making that may come another time.
    """

    model: str
    scale: Scale
    folder: Path
    texts: Mapping[str, Text]
    task_data: Path | None = None
    questions: str | None = None
    allow_code_execution: bool = False
    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
    tell: Callable[[str], Any] = field(default=lambda line: None)
    broken: list[str] = field(default_factory=list)

    @property
    def paper_model(self) -> str:
        """The paper's model whose numbers stand beside ours."""
        name = Path(self.model).name.lower()
        for part, label in _PAPER_MODELS.items():
            if part in name:
                return label
        return LLAMA

    @property
    def shown_model(self) -> str:
        """The model without the folders it lies in."""
        path = Path(self.model)
        return path.name if path.exists() else self.model

    # --- models --------------------------------------------------------------------------

    def converted(
        self,
        method: str,
        layout: str | None = None,
        *,
        sparsity: float | None = None,
        settings: Mapping[str, object] | None = None,
        domains: Sequence[str] = ("wiki",),
        samples: int | None = None,
        model: str | None = None,
    ) -> str:
        """The folder of the model converted so. Raises MoesaicError where it cannot be."""
        model = model or self.model
        sources = {name: self.texts[name].calibration for name in domains}
        given = {
            "method": method,
            "layout": layout,
            "sparsity": sparsity,
            "settings": dict(settings or {}),
            "domains": list(domains),
            "samples": samples or self.scale.samples,
            "model": self._name(model),
        }
        output = self._output(f"{method}-{layout or sparsity}", given)
        if not output.exists():
            self.tell(f"converting {self._name(model)} by {method}")
            was_begun = Path(f"{output}.partial").exists()
            calibration: Any = sources
            if len(sources) == 1:
                [calibration] = sources.values()
            _, report = moesaic.convert(
                model,
                method,
                layout,
                calibration,
                settings=settings,
                sparsity=sparsity,
                output=output,
                samples=samples or self.scale.samples,
                sequence_length=self.scale.length,
                resume=True,
                device=self.device,
                dtype=self.dtype,
                trust_remote_code=self.trust_remote_code,
            )
            if not was_begun:
                self._keep_time(output, report.seconds)
        return str(output)

    def tuned(
        self, model: str, samples: int | None = None, domain: str = "wiki"
    ) -> str:
        """The folder of the converted model fine-tuned as in the paper, by next tokens."""
        samples = self.scale.tuning if samples is None else samples
        if samples == 0:
            return model
        given = {
            "tuned": self._name(model),
            "samples": samples,
            "domain": domain,
        }
        name = self._name(model).rpartition("-")[0]
        output = self._output(f"{name}-tuned-{samples}", given)
        if not output.exists():
            self.tell(f"fine-tuning {self._name(model)}")
            was_begun = Path(f"{output}.partial").exists()
            report = moesaic.finetune(
                model,
                output,
                self.texts[domain].calibration,
                samples=samples,
                sequence_length=self.scale.length,
                distill="none",
                resume=True,
                device=self.device,
                dtype=self.dtype,
                trust_remote_code=self.trust_remote_code,
            )
            if not was_begun:
                self._keep_time(output, report.seconds)
        return str(output)

    def exported(self, model: str) -> str:
        """The folder of a converted model as a stock mixture (glm4_moe)."""
        output = self._output("exported", {"exported": self._name(model)})
        if not output.exists():
            self.tell(f"exporting {self._name(model)}")
            moesaic.export(
                model,
                "glm4_moe",
                output,
                verify=self.texts["wiki"].evaluation,
                trust_remote_code=self.trust_remote_code,
            )
        return str(output)

    def report(self, model: str) -> ConversionReport:
        """What the conversion of a folder said of itself."""
        values = _read(Path(model) / "moesaic_report.json")
        return ConversionReport.from_dict(values)

    def seconds_of(self, model: str) -> float | None:
        """How long `converted` or `tuned` took to make a folder.

        None where it was stopped on the way: what is known then is the last part alone.
        """
        path = self._time_of(Path(model))
        if not path.is_file():
            return None
        return float(_read(path)["seconds"])

    def tuning_report(self, model: str) -> dict[str, Any]:
        """What the fine-tuning of a folder said of itself."""
        return _read(Path(model) / "moesaic_finetune.json")

    # --- measurements --------------------------------------------------------------------

    def perplexity(self, model: str, domain: str) -> float:
        """Of a model on the part of a domain's text that nothing was fitted on."""
        source = self.texts[domain].evaluation
        given = {"perplexity": self._name(model), "domain": domain}

        def measure() -> dict[str, Any]:
            self.tell(f"perplexity of {self._name(model)} on {domain}")
            return evaluate(
                model,
                [source],
                sequence_length=self.scale.length,
                max_tokens=self.scale.tokens,
                device=choose_device(self.device),
                dtype=self.dtype,
                trust_remote_code=self.trust_remote_code,
            )

        found = self._measured(given, measure)
        [value] = found[
            "perplexity"
        ].values()  # of a folder that may have been moved
        return float(value)

    def answers(
        self, model: str, task: str, votes: Sequence[int] = ()
    ) -> dict[str, Any]:
        """A model's row for one task: `score`, `standard_error` and more."""
        given = {
            "task": task,
            "of": self._name(model),
            "votes": list(votes),
            "data": self.questions,
        }

        def measure() -> dict[str, Any]:
            self.tell(f"asking {self._name(model)} {task}")
            found = evaluate_tasks(
                model,
                [task],
                fewshot=self.scale.shots.get(task),
                limit=self.scale.questions_of(task),
                task_data=self.task_data,
                allow_code_execution=self.allow_code_execution,
                self_consistency=votes,
                device=choose_device(self.device),
                dtype=self.dtype,
                trust_remote_code=self.trust_remote_code,
            )
            row: dict[str, Any] = found["tasks"][task]
            return row

        return self._measured(given, measure)

    def speeds(self, model: str, context: int) -> list[dict[str, Any]]:
        """Rows of `moesaic.bench` beside the dense model; times, so never the same twice."""
        given = {
            "bench": self._name(model),
            "against": self._name(self.model),
            "context": context,
        }

        def measure() -> dict[str, Any]:
            return moesaic.bench(
                model,
                against=self.model,
                prefill=context,
                decode=self.scale.decode,
                batches=self.scale.batches,
                rounds=self.scale.rounds,
                device=self.device,
                dtype=self.dtype,
                trust_remote_code=self.trust_remote_code,
                progress=self.tell,
            )

        rows: list[dict[str, Any]] = self._measured(given, measure)["rows"]
        return rows

    def compared(
        self, methods: Sequence[str], layout: str, references: Sequence[str]
    ) -> dict[str, Any]:
        """`moesaic.compare` at one layout, each result fine-tuned; nothing is kept but numbers."""
        text = self.texts["wiki"]
        given = {
            "compared": list(methods),
            "layout": layout,
            "references": list(references),
        }
        return moesaic.compare(
            self.model,
            list(methods),
            layout=layout,
            calibration=text.calibration,
            text=[text.evaluation],
            references=references,
            seeds=1,
            samples=self.scale.samples,
            sequence_length=self.scale.length,
            max_tokens=self.scale.tokens or 2**40,
            finetune=self.scale.tuning,
            distill="none",
            output=self.folder / "measured" / _digest(given),
            resume=True,
            device=self.device,
            dtype=self.dtype,
            trust_remote_code=self.trust_remote_code,
            progress=self.tell,
        )

    # --- what is kept --------------------------------------------------------------------

    def _name(self, model: str) -> str:
        """A model as messages and files name it: without the folder's own place."""
        path = Path(model)
        if path.is_relative_to(self.folder):
            return path.name
        return model

    def _output(self, name: str, given: Mapping[str, Any]) -> Path:
        return self.folder / "models" / f"{name}-{_digest(given)[:8]}"

    def _time_of(self, model: Path) -> Path:
        """The file that keeps how long it took to make a model's folder."""
        return self.folder / "measured" / f"{model.name}.seconds.json"

    def _keep_time(self, model: Path, seconds: float) -> None:
        path = self._time_of(model)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps({"seconds": seconds}) + "\n")

    def _measured(
        self, given: Mapping[str, Any], measure: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """What was measured before with the same input, or now."""
        path = self.folder / "measured" / f"{_digest(given)}.json"
        if path.is_file():
            found = _read(path)
            return dict(found["result"])
        result = measure()
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = {"given": given, "result": result}
        write_file(path, json.dumps(kept, indent=1, default=str) + "\n")
        return result


def _digest(given: Mapping[str, Any]) -> str:
    content = json.dumps(given, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _read(path: Path) -> dict[str, Any]:
    """JSON of our own. Raises MoesaicError where it is damaged."""
    try:
        values: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise MoesaicError(
            f"{path} cannot be read ({error}); remove it and run again"
        ) from error
    return values
