"""Benchmarks: one registry, one runner. ``python -m benchmarks`` lists them, ``python -m benchmarks NAME`` runs one.

A benchmark names its cases, the contenders and a float64 reference. The runner checks every contender's
result before timing it, times each of them in every round, and writes the times with the machine,
the settings and the versions beside them.
"""
