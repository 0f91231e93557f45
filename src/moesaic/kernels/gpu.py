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

FEW_TOKENS = 64  # of which experts_triton.py takes no more at once
# Blocks of many experts, or of so many weights in W_down, take no more than these:
# products for all tokens take less time from there on, on an H200.
FEWER_TOKENS = 32
MANY_EXPERTS = 32
MANY_WEIGHTS = 2**24
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

log = logging.getLogger(__name__)

# Kernels that could not be imported or compiled: said once, and not tried again.
_failed: set[str] = set()
_too_large: set[str] = set()  # somewhere, said once


def takes(x_TD: Tensor) -> bool:
    """Whether Triton runs where this tensor lies."""
    return x_TD.is_cuda or (INTERPRETED and x_TD.is_cpu)


def are_few(x_TD: Tensor, down_RDM: Tensor) -> bool:
    """Whether so many tokens of a block are faster by kernels that read each weight once."""
    is_large = len(down_RDM) > MANY_EXPERTS or down_RDM.numel() >= MANY_WEIGHTS
    return len(x_TD) <= (FEWER_TOKENS if is_large else FEW_TOKENS)


def call(name: str, x_TD: Tensor, *others: Any) -> Tensor | None:
    """What the op `name` of the file NAME_triton.py gives, (T, D).

    None, and the first time a warning with the reason, where it cannot be had. A graph
    that torch compiles holds the op, and has no other way when it runs.
    """
    if not is_there(name):
        return None
    op = getattr(torch.ops.moesaic, name)
    try:
        y_TD: Tensor = op(x_TD, *others)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever it is, the model runs without
        _give_up(name, error)
        return None
    return y_TD


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_there(name: str) -> bool:
    """Whether the file can be imported, which makes its op one of torch's."""
    if name not in _failed:
        try:
            importlib.import_module(f"moesaic.kernels.{name}_triton")
        except Exception as error:  # not only where Triton is missing
            _give_up(name, error)
    return name not in _failed


def _give_up(name: str, error: Exception) -> None:
    """Says so; one that does not fit into this GPU's memory may for other inputs."""
    if type(error).__name__ == "OutOfResources" and name in _too_large:
        return
    if type(error).__name__ == "OutOfResources":
        _too_large.add(name)
    else:
        _failed.add(name)
    reason = str(error).strip().splitlines() or [type(error).__name__]
    log.warning(
        "%s run without moesaic's kernel for GPUs: %s", name, reason[-1]
    )
