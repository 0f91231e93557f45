"""What must be equal for the checkpoints of a killed run to be worth going on with."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from moesaic.calibration.checks import checksum, digest_of_tokens
from moesaic.finetune.prepare import TrainingInput
from moesaic.finetune.report import FinetuneReport
from moesaic.output.atomic import write_file
from moesaic.output.draft import UnfinishedError

LIBRARIES = ("moesaic", "torch", "transformers", "peft")
WEIGHTS = "weights.sha256"  # of the dense model that a run was started with


def fingerprint(
    inputs: TrainingInput,
    student: Any,
    teacher: Any,
    report: FinetuneReport,
    processes: int,
) -> dict[str, Any]:
    """Names, settings, and hashes of the weights and of the text. Holds no tensors.

    `teacher` is the model that is imitated, None where there is none.
    """
    settings = asdict(inputs.settings)
    as_json = json.dumps(settings)
    return {
        "model": report.model,
        "weights": hash_of_weights(student),
        "distill": report.distill,
        "teacher's weights": hash_of_weights(teacher),
        "tune_teacher": report.teacher_tuned,
        "settings": json.loads(as_json),
        "merge": report.merged,
        "training tokens": digest_of_tokens(inputs.windows_NL),
        "dtype": str(student.dtype).removeprefix("torch."),
        "processes": processes,
        "versions": {name: version(name) for name in LIBRARIES},
    }


def hash_of_weights(model: Any) -> str | None:
    """Of every weight's name and checksum: enough to tell models apart, and fast."""
    if model is None:
        return None
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        line = f"{name} {checksum(tensor.detach())}"
        digest.update(line.encode())
    return digest.hexdigest()


def check_same_weights(dense: Any, name: str, path: Path) -> None:
    """A killed run goes on with the dense weights that it was started with.

    Their hash lies in a file of the draft, which the first run writes. Raises
    UnfinishedError where it is another one.
    """
    now = str(hash_of_weights(dense))
    if not path.is_file():
        write_file(path, now)
        return
    if path.read_text("utf-8") != now:
        raise UnfinishedError(
            f"{path.parent} was started with other weights of {name}; run with the "
            "same, or pass --overwrite"
        )
