"""Settings of property tests of kernels, whose shapes are drawn. The shapes that have found faults are cases
of their own, by `crossed.diagonal`."""

from hypothesis import HealthCheck, settings

SWEEP = settings(
    max_examples=20,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
"""The same examples in every run, and no limit on the time of one."""
