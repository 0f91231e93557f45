"""The model card: README.md beside the weights, with what the hub reads at its top."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml
from huggingface_hub import ModelCard, ModelCardData, metadata_load

CARD_FILE = "README.md"
TAG = "moesaic"
MIXTURE_TAG = "mixture-of-experts"

Row = tuple[str, str]  # of the card's table: a name and its value
# A card's license, and license_name and license_link where that is "other".
Licence = dict[str, str]
_LICENCE_KEYS = ("license", "license_name", "license_link")


def front_matter(
    licence: Licence,
    base_model: str | None = None,
    library: str = "transformers",
    routed: bool = True,
) -> ModelCardData:
    """What the hub reads. Only a model that routes is called a mixture of experts.

    `base_model` is left out unless it is a hub id: a folder's name means nothing elsewhere.
    """
    if base_model is not None and "/" not in base_model:
        base_model = None
    tags = [TAG, MIXTURE_TAG] if routed else [TAG]
    return ModelCardData(
        library_name=library,
        pipeline_tag="text-generation",
        license=licence.get("license"),
        license_name=licence.get("license_name"),
        license_link=licence.get("license_link"),
        base_model=base_model,
        tags=tags,
    )


def build_card(
    front: ModelCardData,
    title: str,
    summary: str,
    rows: Sequence[Row],
    sections: Sequence[str] = (),
) -> str:
    """The text of a card: a title, what the model is, a table of facts, and what follows it."""
    parts = [f"# {title}", summary, _table(rows), *sections]
    body = "\n\n".join(parts)
    header = f"---\n{front.to_yaml()}\n---"
    card = ModelCard(f"{header}\n\n{body}\n")
    return str(card)


def code(text: str) -> str:
    """A block of code: indented lines."""
    lines = text.splitlines()
    indented = [f"    {line}" if line else "" for line in lines]
    return "\n".join(indented)


def licence_of(card: Path | None) -> Licence:
    """The licence that a model's own card states. Empty without a card that can be read."""
    if card is None:
        return {}
    try:
        front = metadata_load(card)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    if not front or front.get("license") is None:
        return {}
    return {
        key: str(front[key])
        for key in _LICENCE_KEYS
        if front.get(key) is not None
    }


def licence_row(licence: Licence) -> Row:
    """What the table says of it."""
    known = licence.get("license_name") or licence.get("license")
    return "Licence", known or "as the base model's"


def _table(rows: Sequence[Row]) -> str:
    lines = ["| | |", "|---|---|"]
    for name, value in rows:
        shown = value.replace("|", r"\|")
        lines.append(f"| {name} | {shown} |")
    return "\n".join(lines)
