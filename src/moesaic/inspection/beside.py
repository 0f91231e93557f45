"""The page beside a model that was just converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from moesaic.inspection.answers import answer
from moesaic.inspection.inspect import (
    PAGE_FILE,
    Inspected,
    Inspection,
    pass_through,
    write_page,
)
from moesaic.inspection.record import read_record


def draw_beside(
    folder: Path,
    model: Any,
    ids_T: Tensor,
    source: str,
    tokenizer: Any,
    trust_remote_code: bool,
) -> Path | None:
    """Writes report.html into the folder of a model that is still in memory.

    A page is not worth a conversion: whatever goes wrong is a line on stderr, and None.
    Costs what `inspect` costs without loading.
    """
    page_file = folder / PAGE_FILE
    try:
        record = read_record(str(folder), trust_remote_code)
        passed = pass_through(model, ids_T, tokenizer, source)
        inspected = Inspected(record, answer(record, None), passed)
        write_page(page_file, Inspection(inspected))
    except Exception as error:  # drawing must not spoil what was converted
        reason = " ".join(str(error).split()) or type(error).__name__
        line = (
            f"{page_file} was not drawn ({reason}); the model is whole, try: "
            f"moesaic inspect {folder} --html FILE"
        )
        Console(stderr=True, soft_wrap=True).print(
            line, markup=False, highlight=False
        )
        return None
    return page_file
