"""Where an export is written: beside its final name, which it gets only when whole."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError

from moesaic.errors import MoesaicError


def check_new(output: Path, suffix: str) -> None:
    """Raises MoesaicError where `output` exists, has another suffix, or cannot be written."""
    if os.path.lexists(output):
        raise MoesaicError(f"output {output} exists; choose another")
    if suffix and output.suffix != suffix:
        raise MoesaicError(
            f"output {output} is one file for llama.cpp; call it NAME{suffix}"
        )
    parent = output.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise MoesaicError(
            f"output {output}: {parent} is no folder that may be written"
        )


@contextmanager
def new_path(output: Path) -> Iterator[Path]:
    """A path to write to, which gets its name when the block ends well, and goes when it fails.

    A killed run leaves NAME.partial-XXXX, which nothing takes for a model.
    """
    made = [parent for parent in output.absolute().parents if not parent.exists()]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        work = Path(
            tempfile.mkdtemp(prefix=f"{output.name}.partial-", dir=output.parent)
        )
    except OSError as error:
        raise MoesaicError(f"cannot write beside {output}: {error}") from error
    try:
        part = work / output.name
        yield part
        mask = os.umask(0)
        os.umask(mask)
        for path in [part, *part.rglob("*")] if part.is_dir() else [part]:
            if path.is_file():
                path.chmod(0o666 & ~mask)  # safetensors makes private files
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        if os.path.lexists(output):
            raise MoesaicError(f"output {output} exists by now; choose another")
        part.rename(output)
    except (OSError, SafetensorError) as error:
        raise MoesaicError(
            f"cannot write {output}: {error}; nothing is left of it"
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
        for parent in made if not output.exists() else ():
            with suppress(OSError):
                parent.rmdir()


def export_card(report: Any, config: Any, licence: str | None) -> str:
    """README.md of an exported model."""
    moe = config.moesaic
    recipe = moe["recipe"]
    front = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if licence:
        front["license"] = licence
    if "/" in moe["base_model"]:  # a hub id; a folder's name means nothing elsewhere
        front["base_model"] = moe["base_model"]
    worst = max(report.scales, key=lambda scale: scale.changed)
    error = max(scale.gate_error for scale in report.scales)
    rows = [
        ("Base model", moe["base_model"]),
        ("Licence", licence or "as the base model's"),
        ("Architecture", f"{report.architecture}, without code of its own"),
        ("Layout", moe["layout"]),
        ("Recipe", f"`{recipe['name']}`: {recipe['about']}"),
        ("Gates", f"1 up to {error:.1e} (root mean square, worst layer)"),
        ("Tokens that run other experts", f"{worst.changed:.2%} (worst layer)"),
    ]
    if (found := report.comparison) is not None:
        rows += [
            (
                "Logits",
                f"differ by {found.mean:.1e} of their rms, at most {found.largest:.1e}",
            ),
            (
                "Perplexity",
                f"{found.perplexity:.4f}, before the export "
                f"{found.original_perplexity:.4f}",
            ),
        ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return f"""---
{yaml.safe_dump(front | {"tags": ["moesaic", "mixture-of-experts"]}, sort_keys=False).strip()}
---

# {Path(moe["base_model"]).name}, {moe["layout"]}, as {report.architecture}

{moe["base_model"]} with every dense feed-forward network cut into shared and routed experts by
moesaic, written for stock engines.

| | |
|---|---|
{table}
"""
