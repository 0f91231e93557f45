"""The texts of the tables: what calibrates, and what is measured on, by domain.

Smoke takes them from the running Python, so that it needs no network. A text that has no
split for evaluation is cut: its last tenth is measured on.
"""

from __future__ import annotations

import sysconfig
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moesaic.calibration.text import has_heldout_split, read_documents
from moesaic.errors import MoesaicError, unknown
from moesaic.experiments.contents import DOMAINS, Experiment
from moesaic.output.atomic import write_file

USUAL = {"wiki": "wikitext2", "c4": "c4"}
WHERE_FROM = {
    "code": "the paper takes OpenCoder; any file of code will do",
    "maths": "the paper takes the split math of nvidia/Nemotron-Post-Training-Dataset-v1, "
    "its messages as text",
    "science": "the paper takes the split stem of "
    "nvidia/Nemotron-Post-Training-Dataset-v1, its messages as text",
}
_SMOKE_CHARACTERS = 150_000
_MEASURED = 0.1  # of a text without a split of its own

# Python's own sources and documentation, as stand-ins.
_SMOKE_FILES = {
    "wiki": ("argparse", "difflib", "ipaddress", "optparse", "shutil"),
    "code": ("subprocess", "zipfile", "pathlib", "tarfile", "inspect"),
    "maths": ("fractions", "statistics", "numbers", "random", "_pydecimal"),
    "science": ("calendar", "_pydatetime", "datetime", "colorsys", "locale"),
}
SMOKE_TEXTS = (
    "texts: wiki, code, maths and science are sources of Python's standard library, c4 is "
    "Python's documentation"
)


@dataclass(frozen=True)
class Text:
    """SOURCEs of one domain: to calibrate and train on, and to measure on."""

    calibration: str
    evaluation: str


def named_sources(given: Mapping[str, str], smoke: bool) -> dict[str, str]:
    """The source of each domain, those given first. Raises MoesaicError."""
    for domain in given:
        if domain not in DOMAINS:
            raise unknown("text", domain, DOMAINS)
    usual = {} if smoke else USUAL
    return {**usual, **given}


def check_sources(
    sources: Mapping[str, str], experiments: list[Experiment]
) -> None:
    """Raises MoesaicError where a table lacks a text, or one cannot be read."""
    needed = [domain for domain in DOMAINS if _is_needed(domain, experiments)]
    for domain in needed:
        if domain not in sources:
            names = [row.name for row in experiments if domain in row.texts]
            raise MoesaicError(
                f"{', '.join(names)} needs a text of {domain}: give --text "
                f"{domain}=SOURCE ({WHERE_FROM[domain]}), or leave it out by --tables"
            )
    for domain in needed:
        read_documents(sources[domain])


def _is_needed(domain: str, experiments: list[Experiment]) -> bool:
    return any(domain in row.texts for row in experiments)


def prepare_texts(
    sources: Mapping[str, str], folder: Path, smoke: bool
) -> dict[str, Text]:
    """Every domain's text; what is cut or made is written below `folder`."""
    texts = {}
    for domain in DOMAINS:
        source = sources.get(domain)
        if source is None and not smoke:
            continue
        if source is not None and has_heldout_split(source):
            texts[domain] = Text(source, source)
            continue
        if source is None:
            text = smoke_text(domain)
        else:
            text = "\n\n".join(read_documents(source))
        texts[domain] = _cut(text, domain, folder)
    return texts


def _cut(text: str, domain: str, folder: Path) -> Text:
    place = int(len(text) * (1 - _MEASURED))
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"calibration": text[:place], "evaluation": text[place:]}
    paths = {}
    for part, content in parts.items():
        path = folder / f"{domain}.{part}.txt"
        write_file(path, content)
        paths[part] = str(path)
    return Text(**paths)


def smoke_text(domain: str) -> str:
    """A stand-in of some hundred thousand characters, the same for the same Python."""
    if domain == "c4":
        from pydoc_data.topics import topics

        documents = [topics[name] for name in sorted(topics)]
    else:
        documents = [_source(module) for module in _SMOKE_FILES[domain]]
    text = "\n\n".join(document for document in documents if document)
    return text[:_SMOKE_CHARACTERS]


def _source(module: str) -> str:
    """A module's source; nothing where this Python has no such file."""
    path = Path(sysconfig.get_paths()["stdlib"]) / f"{module}.py"
    if not path.is_file():
        return ""
    with tokenize.open(path) as file:
        return file.read()
