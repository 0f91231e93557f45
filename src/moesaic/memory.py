"""Memory that the process has freed, given back to the system."""

from __future__ import annotations

import ctypes


def give_back_freed_memory() -> None:
    """Returns freed pages to the system, where the C library can (glibc).

    Weights of a layer come and go in pieces of some megabytes. glibc keeps such pieces,
    and a long run scatters small ones between them: after 100 layers of 29 MB it held 0.5 GB
    that nobody used. Costs some milliseconds.
    """
    library = ctypes.CDLL(None)
    trim = getattr(library, "malloc_trim", None)
    if trim is not None:
        trim(0)
