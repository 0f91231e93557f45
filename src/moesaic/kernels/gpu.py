"""Where kernels in Triton run, and what becomes of a call that they cannot take.

They are for GPUs. With TRITON_INTERPRET=1 Triton reads them line by line, slowly, on
tensors of a CPU: so they are tested.
"""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

# Kernels that could not be imported or compiled: said once, and not tried again.
_failed: set[str] = set()


def takes(x_TD: Tensor) -> bool:
    """Whether Triton runs where this tensor lies."""
    if x_TD.device.type == "cuda":
        return True
    interprets = os.environ.get("TRITON_INTERPRET") == "1"
    return interprets and x_TD.device.type == "cpu"


def call(name: str, x_TD: Tensor, *others: Any) -> Tensor | None:
    """What the op `name` of the file NAME_triton.py gives, (T, D).

    None, and the first time a warning with the reason, where it cannot be had.
    """
    if name in _failed:
        return None
    try:
        module = importlib.import_module(f"moesaic.kernels.{name}_triton")
        op = getattr(module, name)
        with torch.cuda.device_of(x_TD):  # Triton launches on the current one
            y_TD: Tensor = op(x_TD, *others)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever it is, the model runs without
        _failed.add(name)
        reason = str(error).strip().splitlines() or [type(error).__name__]
        log.warning(
            "%s run without moesaic's kernel for GPUs: %s", name, reason[-1]
        )
        return None
    return y_TD
