"""moesaic turns a dense language model into a Mixture-of-Experts, without training.

A public name is imported when it is first used, for torch takes seconds to import.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from moesaic._version import __version__
from moesaic.registration import register

if TYPE_CHECKING:
    from moesaic.bench.bench import bench
    from moesaic.comparison.compare import compare
    from moesaic.conversion.report import ConversionReport
    from moesaic.errors import MoesaicError
    from moesaic.evaluate.perplexity import perplexity
    from moesaic.export import ExportReport, explain, export
    from moesaic.finetune.convert import convert
    from moesaic.finetune.report import FinetuneReport
    from moesaic.finetune.run import finetune
    from moesaic.inspection.inspect import Inspection, inspect
    from moesaic.layout import Layout
    from moesaic.methods.base import Method
    from moesaic.methods.contents import METHODS
    from moesaic.methods.load import load_method

__all__ = [
    "METHODS",
    "ConversionReport",
    "ExportReport",
    "FinetuneReport",
    "Inspection",
    "Layout",
    "Method",
    "MoesaicError",
    "__version__",
    "bench",
    "compare",
    "convert",
    "explain",
    "export",
    "finetune",
    "inspect",
    "load_method",
    "perplexity",
]

# The module that defines each public name.
_HOMES = {
    "METHODS": "moesaic.methods.contents",
    "ConversionReport": "moesaic.conversion.report",
    "ExportReport": "moesaic.export.run",
    "FinetuneReport": "moesaic.finetune.report",
    "Inspection": "moesaic.inspection.inspect",
    "Layout": "moesaic.layout",
    "Method": "moesaic.methods.base",
    "MoesaicError": "moesaic.errors",
    "bench": "moesaic.bench.bench",
    "compare": "moesaic.comparison.compare",
    "convert": "moesaic.finetune.convert",
    "explain": "moesaic.export.fits",
    "export": "moesaic.export.run",
    "finetune": "moesaic.finetune.run",
    "inspect": "moesaic.inspection.inspect",
    "load_method": "moesaic.methods.load",
    "perplexity": "moesaic.evaluate.perplexity",
}


def __getattr__(name: str) -> object:
    """Imports a public name at its first use. Python calls this for a missing name."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'moesaic' has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    setattr(sys.modules[__name__], name, value)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `moesaic.bench`, `moesaic.export` and `moesaic.finetune` the functions.

    Importing the packages of these names would put them there.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if name in _HOMES and isinstance(value, ModuleType):
            return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
register()
