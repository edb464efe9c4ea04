"""Numbers of tables as text."""

import math

import pytest

from eagle_kit.report.tables import in_few_digits


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "yes"),
        (False, "no"),
        (0, "0"),
        (7.0, "7"),
        (1234567, "1,234,567"),
        (12345.6, "12,346"),
        (-0.12345, "-0.123"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        ("cpu", "cpu"),
        (None, "None"),
    ],
)
def test_a_number_has_few_digits(value: object, text: str) -> None:
    assert in_few_digits(value) == text
