"""One harness for the benchmarks of kernels, engine, training and serving; nothing in production imports it.

A :class:`~eagle_kit.bench.case.Case` is measured on a :class:`~eagle_kit.bench.case.Machine` into one row of
a :class:`~eagle_kit.bench.record.Record`, the JSON file of a run. :func:`~eagle_kit.bench.runner.conduct`
runs the cases of a benchmark with a progress bar, a table and a deadline, and goes on where a run ended.
"""
