"""float32 products whose factors a shorter number format holds already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_SHORT = {torch.bfloat16}
_INHERITED = "none"


@contextmanager
def products_of(dtype: torch.dtype) -> Iterator[None]:
    """For a while float32 products may take their factors for `dtype`.

    For factors that `dtype` holds, such as activations and weights of a model in it:
    only the order of sums differs then. Other factors may be rounded. torch gives such
    products to oneDNN on a CPU, which multiplies in bfloat16 where the processor has
    tiles for it, and in float32 elsewhere (on an AMD processor twice as fast as torch's
    usual float32 product), and on a GPU in TF32, which holds bfloat16. Nothing changes
    for other dtypes. The setting is torch's own, of the whole process.
    """
    if dtype not in _SHORT:
        yield
        return
    cpu = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    gpu = torch.backends.cuda.matmul
    before = [_own_setting(backend) for backend in (cpu, gpu)]
    cpu.fp32_precision = "bf16"
    gpu.fp32_precision = "tf32"
    try:
        yield
    finally:
        cpu.fp32_precision, gpu.fp32_precision = before


def _own_setting(backend: Any) -> str:
    """What was set for a backend itself, and not for all of torch."""
    precision: str = backend.fp32_precision
    if precision == torch.backends.fp32_precision:  # type: ignore[attr-defined]
        return _INHERITED
    return precision
