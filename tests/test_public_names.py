"""What `import moesaic` offers, and nothing else."""

from __future__ import annotations

import moesaic


def test_public_names() -> None:
    assert moesaic.__all__ == [
        "RECIPES",
        "ConversionReport",
        "ExportReport",
        "FinetuneReport",
        "Layout",
        "MoesaicError",
        "Recipe",
        "__version__",
        "compare",
        "convert",
        "explain",
        "export",
        "finetune",
        "load_recipe",
        "perplexity",
    ]


def test_every_public_name_exists_and_says_what_it_is() -> None:
    for name in moesaic.__all__:
        value = getattr(moesaic, name)
        assert value is not None
        assert not callable(value) or value.__doc__, f"{name} has no docstring"
