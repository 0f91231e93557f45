"""What `import moesaic` offers, and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

import moesaic
from tests.processes import run_python


def test_public_names() -> None:
    assert moesaic.__all__ == [
        "METHODS",
        "ConversionReport",
        "ExportReport",
        "FinetuneReport",
        "Inspection",
        "Layout",
        "Method",
        "MoesaicError",
        "__version__",
        "bench",
        "compare",
        "convert",
        "explain",
        "export",
        "finetune",
        "inspect",
        "load_method",
        "perplexity",
    ]


def test_every_public_name_exists_and_says_what_it_is() -> None:
    for name in moesaic.__all__:
        value = getattr(moesaic, name)
        assert value is not None
        assert not callable(value) or value.__doc__, f"{name} has no docstring"


def run(code: str) -> str:
    """What a fresh Python prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def run_with_others(code: str) -> None:
    """In a Python that has imported what moesaic builds on, but nothing of moesaic."""
    others = (
        "torch",
        "transformers.modeling_utils",
        "transformers.trainer",
        "transformers.generation",
    )
    done = run_python(code, imported=others, warnings="error")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "code",
    [
        "import moesaic.export.run; import moesaic",
        "import moesaic; moesaic.export; import moesaic.export.stock",
        "import moesaic; import moesaic.export; import moesaic.finetune.report",
        "from moesaic.export.stock import blocks; import moesaic",
        "from moesaic import export, finetune; import moesaic.finetune, moesaic",
    ],
)
def test_functions_named_as_packages_stay_functions(code: str) -> None:
    code += """
import types
from moesaic import export, finetune
for function in (moesaic.export, moesaic.finetune, export, finetune):
    assert isinstance(function, types.FunctionType), function
"""
    run_with_others(code)


def test_importing_moesaic_imports_nothing_heavy() -> None:
    heavy = "torch", "transformers", "numpy", "scipy"
    assert run(f"import sys, moesaic; print([n for n in {heavy} if n in sys.modules])") == "[]"


@pytest.mark.parametrize(
    "code",
    [
        "import moesaic; from transformers import AutoConfig",
        "from transformers import AutoConfig; import moesaic",
        "import moesaic.modeling; from transformers import AutoConfig",
        """
from importlib.util import find_spec
import moesaic
assert find_spec("transformers") is not None  # looked for, but not imported
from transformers import AutoConfig
""",
    ],
)
def test_transformers_knows_our_architecture_after_import_moesaic(code: str) -> None:
    assert run(f"{code}\nprint(AutoConfig.for_model('moesaic').model_type)") == "moesaic"


@pytest.mark.parametrize("module", ["blocks", "experts_fit"])
def test_a_kernels_module_may_be_the_first_that_is_imported(module: str) -> None:
    run(f"import moesaic.kernels.{module}")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'exprot'"):
        moesaic.exprot  # noqa: B018


def test_public_names_are_listed_before_they_are_used() -> None:
    listed = run("import moesaic; print(*dir(moesaic))").split()
    assert set(moesaic.__all__) <= set(listed)
