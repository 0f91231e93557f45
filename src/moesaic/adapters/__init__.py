"""Model families: where the FFNs are and how to read them."""

from moesaic.adapters.ffn import DenseFFN
from moesaic.adapters.mixture import SUPPORTED_MIXTURES, Mixtures
from moesaic.adapters.structure import PATTERNS, SUPPORTED, FFNs, find_ffns

__all__ = [
    "PATTERNS",
    "SUPPORTED",
    "SUPPORTED_MIXTURES",
    "DenseFFN",
    "FFNs",
    "Mixtures",
    "find_ffns",
]
