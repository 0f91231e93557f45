"""Products of matrices whose factors a short number format holds, at the processor's speed."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _python_dispatch as dispatch
from torch.utils._pytree import tree_map_only

_SHORT = {torch.bfloat16}
_INHERITED = "none"
# By which of its instructions an x86 processor multiplies such numbers.
_INSTRUCTIONS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16"),
}
# A weight is widened for every product; where each factor has so many rows that pays.
_ROWS = 32
_aten = torch.ops.aten
_PRODUCTS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.linear.default,  # arrives whole in inference mode
    _aten.matmul.default,
    _aten._grouped_mm.default,
}


@contextmanager
def widened_products(
    dtype: torch.dtype, device: torch.device
) -> Iterator[None]:
    """For a while a CPU multiplies `dtype` in float32, where it has no instructions for it.

    torch emulates such products on an x86 processor without AVX-512's or AMX's for
    them: SmolLM2 in bfloat16 takes six times as long there as in float32. Here both
    factors of each product of 32 rows or more become float32, one product at a time, and
    the result becomes `dtype` again: sums were in float32 before, so nothing but their
    order changes. Gradients follow. Memory: factors and result of one product in
    float32. Nothing changes for other dtypes, on other processors and on a GPU. Each
    operation of torch costs some microseconds more meanwhile.
    """
    stack = dispatch._get_current_dispatch_mode_stack()
    is_there = any(
        isinstance(mode, _WidenedProducts) and mode.dtype == dtype
        for mode in stack
    )
    if is_there or device.type != "cpu" or not is_emulated(dtype):
        yield
        return
    with _WidenedProducts(dtype):
        yield


def is_emulated(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies numbers of a short format by other instructions.

    False where torch is too old to say what the processor has.
    """
    instructions = _INSTRUCTIONS.get(dtype)
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    if instructions is None or not is_x86 or capabilities is None:
        return False
    found = capabilities()
    return not any(found.get(name) for name in instructions)


@contextmanager
def emulated_products() -> Iterator[None]:
    """For a while products are again what they are outside of `widened_products`.

    For what is timed: engines do not widen.
    """
    with dispatch._disable_current_modes():
        yield


class _WidenedProducts(dispatch.TorchDispatchMode):
    """Sees every operation below autograd, and calls products with float32 factors."""

    leaves_kernels = True  # of moesaic, which widen by themselves
    supports_higher_order_operators = True  # they are left alone

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What torch compiles by itself, as flex attention does, it compiles without us."""
        return True

    def __init__(self, dtype: torch.dtype):
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Asked for a dtype, a product would have to be asked for another one.
        if func not in _PRODUCTS or kwargs or not self._pays(args):
            return func(*args, **kwargs)
        wide = tree_map_only(Tensor, self._widened, args)
        return func(*wide).to(self.dtype)

    def _pays(self, args: Any) -> bool:
        """Whether all factors are of our kind, on the CPU, and large enough."""
        if any(isinstance(argument, torch.dtype) for argument in args):
            return False
        for tensor in args:
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                continue  # the ends of groups are whole numbers
            if tensor.dtype != self.dtype or tensor.device.type != "cpu":
                return False
            is_factor = tensor.dim() > 1  # and no bias
            if is_factor and tensor.numel() < _ROWS * tensor.shape[-1]:
                return False
        return True

    def _widened(self, tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype == self.dtype else tensor


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
