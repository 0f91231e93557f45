"""Converted models as stock MoE architectures, which engines run unmodified."""

from moesaic.export.run import FORMATS, ExportReport, explain, export

__all__ = ["FORMATS", "ExportReport", "explain", "export"]
