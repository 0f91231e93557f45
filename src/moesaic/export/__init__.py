"""Converted models as stock architectures, for engines that know nothing of moesaic."""

from moesaic.export.fits import FORMATS, explain
from moesaic.export.run import ExportReport, export

__all__ = ["FORMATS", "ExportReport", "explain", "export"]
