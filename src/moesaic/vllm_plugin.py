"""Makes our architecture known to vLLM, which calls this where moesaic is installed beside it.

vLLM finds it by the entry point `vllm.general_plugins`. Then `vllm serve FOLDER` runs a
converted model by vLLM's Transformers backend (vllm_model.py), and no code beside the
weights is run.
"""

from __future__ import annotations

import logging
from importlib import import_module

ARCHITECTURE = "MoesaicForCausalLM"
MODEL = "moesaic.vllm_model:MoesaicForCausalLM"

log = logging.getLogger(__name__)


def register() -> None:
    """Registers with transformers' Auto classes and with vLLM, in each of its processes.

    vLLM calls it for every model: where it cannot, others are to be served nevertheless.
    """
    try:
        import_module("moesaic.modeling")
    except ImportError as error:
        log.warning("vLLM cannot serve models of moesaic: %s", error)
        return
    registry = import_module("vllm").ModelRegistry
    if ARCHITECTURE not in registry.get_supported_archs():
        registry.register_model(ARCHITECTURE, MODEL)
