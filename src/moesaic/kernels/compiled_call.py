"""A function of the compiled library and what it is given, as a function of tokens.

Shape suffixes: T tokens, D inputs, N outputs of a token.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from moesaic.kernels.build import library

# What tokens may be made of, and how the functions for it are called.
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
# The struct, the tokens, where their outputs go, how many they are, threads.
_ARGUMENTS = (
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int32,
)


class CompiledCall:
    """What `moesaic_WHAT_DTYPE` puts out (T, N) for tokens (T, D) of that dtype.

    `struct` holds where the weights lie, so whoever calls sees to it that they do still.
    Threads of Python may share it. Raises RuntimeError where nothing is compiled, and, as
    torch does, where there is no memory.
    """

    def __init__(
        self,
        what: str,
        struct: ctypes.Structure,
        dtype: torch.dtype,
        outputs: int,
    ):
        compiled = library()
        if compiled is None:
            raise RuntimeError("moesaic's kernels for a CPU are not compiled")
        self.function = getattr(compiled, f"moesaic_{what}_{DTYPES[dtype]}")
        self.function.argtypes = _ARGUMENTS
        self.function.restype = ctypes.c_int32
        self.struct = struct
        self.address = ctypes.addressof(struct)
        self.outputs = outputs

    def __call__(self, x_TD: Tensor) -> Tensor:
        x_TD = x_TD.contiguous()
        tokens = len(x_TD)
        y_TN = torch.empty(
            (tokens, self.outputs), dtype=x_TD.dtype, device=x_TD.device
        )
        has_memory = self.function(
            self.address,
            x_TD.data_ptr(),
            y_TN.data_ptr(),
            tokens,
            torch.get_num_threads(),
        )
        if not has_memory:
            raise RuntimeError(
                f"no memory for {tokens:,} tokens at once in moesaic's kernel for a CPU; "
                "take fewer"
            )
        return y_TN
