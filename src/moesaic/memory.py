"""Memory that a layer takes while it is worked on, and gives back after that.

And models that a `device_map` has spread over devices, which come together meanwhile.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from torch import nn


@contextmanager
def lent_to(device: torch.device, module: nn.Module) -> Iterator[None]:
    """The module on the device meanwhile; what was freed goes back to the system then.

    Then it is where it was. Weights that it still has take their old memory again, which
    for a checkpoint on a CPU is the file: nothing is copied back.
    """
    home = next(module.parameters()).device
    before = []
    if home != device:
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False):
                before.append((part, name, parameter, parameter.data))
    try:
        if home != device:
            module.to(device)
        yield
    finally:
        # Parts that have been replaced get theirs too, and nobody sees them.
        for part, name, parameter, data in before:
            parameter.data = data
            part.register_parameter(name, parameter)
        if home != device:
            module.to(home)
        give_back_freed_memory()


def is_spread(model: Any) -> bool:
    """Whether a `device_map` has put parts of a model on different devices."""
    return len(set(getattr(model, "hf_device_map", {}).values())) > 1


@contextmanager
def gathered(model: Any) -> Iterator[None]:
    """A spread model in main memory meanwhile, without accelerate's hooks.

    Hooks take inputs to where a layer was, not to where it is worked on. After that, or
    after an error, parts of the same names are where they were. Other models stay as they
    are.
    """
    if not is_spread(model):
        yield
        return
    remove_hook_from_submodules(model)
    model.to("cpu")
    model.tie_weights()  # of two devices each had a copy
    try:
        yield
    finally:
        # A method may have cut some of them.
        left = dict(model.named_modules())
        places = model.hf_device_map.items()
        device_map = {name: place for name, place in places if name in left}
        skip_keys = model._skip_keys_device_placement
        dispatch_model(model, device_map, skip_keys=skip_keys)


def give_back_freed_memory() -> None:
    """Returns freed pages to the system, where the C library can (glibc).

    Weights of a layer come and go in pieces of some megabytes. glibc keeps such pieces,
    and a long run scatters small ones between them: after 100 layers of 29 MB it held 0.5 GB
    that nobody used. Costs some milliseconds.
    """
    if os.name != "posix":
        return
    library = ctypes.CDLL(None)
    trim = getattr(library, "malloc_trim", None)
    if trim is not None:
        trim(0)
