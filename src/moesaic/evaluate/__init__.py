"""How good a model is."""

from moesaic.evaluate.perplexity import perplexity

__all__ = ["perplexity"]
