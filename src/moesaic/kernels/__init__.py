"""Faster ways to compute what transformers computes, behind its experts interface.

`experts` is the function that transformers calls; `build` compiles and loads
`experts_cpu.cpp`.
"""
