"""Model families: where the FFNs are and how to read them."""

from moesaic.adapters.ffn import DenseFFN
from moesaic.adapters.structure import PATTERNS, SUPPORTED, FFNs, find_ffns

__all__ = ["PATTERNS", "SUPPORTED", "DenseFFN", "FFNs", "find_ffns"]
