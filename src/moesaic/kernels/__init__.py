"""Faster ways to compute what transformers computes, behind its experts interface.

`experts` is the function that transformers calls; `build` compiles and loads the C++ for
CPUs, `gpu` calls what is written in Triton.
"""

import transformers  # noqa: F401  (our modules register while it is imported, so it goes first)
