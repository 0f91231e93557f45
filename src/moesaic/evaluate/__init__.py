"""How good a model is."""

from moesaic.evaluate.perplexity import perplexity
from moesaic.evaluate.side_by_side import evaluate

__all__ = ["evaluate", "perplexity"]
