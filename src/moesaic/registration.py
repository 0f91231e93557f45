"""Makes our architecture and kernels known to transformers, without importing it.

After `import moesaic`, transformers' Auto classes can load a converted model. To register
with them takes seconds, since transformers is large. So it waits until somebody imports
transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

# They register themselves when they are imported.
_MODULES = ("moesaic.modeling", "moesaic.kernels.experts")
_WAITED_FOR = "transformers"


def register() -> None:
    """Registers now if transformers is imported already, else as soon as it is."""
    if _WAITED_FOR in sys.modules:
        _import_ours()
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds transformers as Python does, with a loader that registers afterwards."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != _WAITED_FOR:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _import_ours()


def _import_ours() -> None:
    for module in _MODULES:
        import_module(module)
