"""Benchmarks, `hatch run bench [area]`: ours, the peer and the physical limit, in one run.

An area is a module of `tools/bench/areas/`, found by its name (a trailing underscore aside). Its
docstring is its title and, after a blank line, the note under its table; its `CASES` maps a case's
name to a function from the device to the measures.
"""
