"""moesaic turns a dense language model into a Mixture-of-Experts, without training."""

from moesaic._version import __version__
from moesaic.comparison.compare import compare
from moesaic.conversion.convert import convert
from moesaic.conversion.report import ConversionReport
from moesaic.errors import MoesaicError
from moesaic.evaluate.perplexity import perplexity
from moesaic.export import ExportReport, explain, export
from moesaic.finetune import FinetuneReport, finetune
from moesaic.layout import Layout
from moesaic.methods.recipe import RECIPES, Recipe, load_recipe

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
