"""float32 products whose factors a shorter number format holds already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SHORT = {torch.bfloat16}


@contextmanager
def products_of(dtype: torch.dtype) -> Iterator[None]:
    """For a while float32 products may take their factors for `dtype`.

    Factors that `dtype` holds, such as activations of a model in it, are not rounded:
    only the order of sums differs. Others are rounded to it, sums stay in float32.
    On a CPU with bfloat16 this takes half of the time or less, on a GPU (TF32, which
    holds bfloat16) an eighth. Nothing changes for other dtypes. The setting is torch's
    own, of the whole process.
    """
    if dtype not in _SHORT:
        yield
        return
    cpu = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    gpu = torch.backends.cuda.matmul
    before = cpu.fp32_precision, gpu.fp32_precision
    cpu.fp32_precision = "bf16"
    gpu.fp32_precision = "tf32"
    try:
        yield
    finally:
        cpu.fp32_precision, gpu.fp32_precision = before
