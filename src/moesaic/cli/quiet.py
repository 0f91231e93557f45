"""Silences what other libraries print beside our own lines."""

from __future__ import annotations

import logging
import os
import warnings


def quieten() -> None:
    """Leaves only errors. Imports transformers, so only a command that runs calls it."""
    # transformers shows a bar of its own while it reads a GGUF file.
    os.environ.setdefault("TQDM_DISABLE", "1")
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    hub_logging.set_verbosity(logging.ERROR)
    warnings.filterwarnings("ignore", module="transformers|huggingface_hub")
