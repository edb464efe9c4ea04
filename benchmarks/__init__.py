"""Benchmarks of this repository's own figures: ``python benchmarks NAME ...``; no package imports them.

A :class:`~benchmarks.case.Case` is measured on a :class:`~benchmarks.case.Machine` into one row of a
:class:`~benchmarks.record.Record`, the JSON file of a run; :func:`~benchmarks.runner.conduct` measures them.
"""
