"""moesaic turns a dense language model into a Mixture-of-Experts, without training."""

from moesaic._version import __version__
from moesaic.compare import compare
from moesaic.convert import convert
from moesaic.errors import MoesaicError
from moesaic.evaluate.perplexity import perplexity
from moesaic.export import ExportReport, explain, export
from moesaic.finetune import FinetuneReport, finetune
from moesaic.layout import Layout
from moesaic.recipe import RECIPES, Recipe, load_recipe
from moesaic.report import ConversionReport

__all__ = [
    "RECIPES",
    "ConversionReport",
    "ExportReport",
    "FinetuneReport",
    "Layout",
    "MoesaicError",
    "Recipe",
    "__version__",
    "compare",
    "convert",
    "explain",
    "export",
    "finetune",
    "load_recipe",
    "perplexity",
]
