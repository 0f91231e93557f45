"""Model families: where the FFNs are and how to read them."""

from moesaic.families.ffn import DenseFFN
from moesaic.families.find import find_ffns
from moesaic.families.mixture import SUPPORTED_MIXTURES, Mixtures
from moesaic.families.structure import PATTERNS, SUPPORTED, FFNs

__all__ = [
    "PATTERNS",
    "SUPPORTED",
    "SUPPORTED_MIXTURES",
    "DenseFFN",
    "FFNs",
    "Mixtures",
    "find_ffns",
]
