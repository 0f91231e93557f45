"""What must be equal for the checkpoints of a killed run to be worth going on with."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from moesaic.calibration.checks import checksum
from moesaic.finetune.prepare import TrainingInput
from moesaic.finetune.report import FinetuneReport

LIBRARIES = ("torch", "transformers", "peft")


def fingerprint(
    inputs: TrainingInput, student: Any, report: FinetuneReport, processes: int
) -> dict[str, Any]:
    """Names, settings, and hashes of the weights and of the text. Holds no tensors."""
    settings = asdict(inputs.settings)
    as_json = json.dumps(settings)
    token_bytes = inputs.windows_NL.numpy().tobytes()
    return {
        "model": report.model,
        "weights": _hash_of_weights(student),
        "distill": report.distill,
        "tune_teacher": report.teacher_tuned,
        "settings": json.loads(as_json),
        "merge": report.merged,
        "training tokens": hashlib.sha256(token_bytes).hexdigest(),
        "dtype": str(student.dtype).removeprefix("torch."),
        "processes": processes,
        "versions": {name: version(name) for name in LIBRARIES},
    }


def _hash_of_weights(model: Any) -> str:
    """Of every weight's name and checksum: enough to tell models apart, and fast."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        line = f"{name} {checksum(tensor.detach())}"
        digest.update(line.encode())
    return digest.hexdigest()
