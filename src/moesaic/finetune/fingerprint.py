"""What must be equal for the checkpoints of a killed run to be worth going on with."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from moesaic.calibration.checks import checksum, digest_of_tokens
from moesaic.finetune.prepare import TrainingInput
from moesaic.finetune.report import FinetuneReport

LIBRARIES = ("torch", "transformers", "peft")


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
