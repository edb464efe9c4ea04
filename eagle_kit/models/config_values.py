"""Checked values of a ``config.json``: numbers within bounds, flags, lists and objects.

The readers take the parsed file, a key of it, and ``where`` the file lies, for messages. Null is absent.
"""

from typing import Any

from eagle_kit.core.errors import UserError, shown
from eagle_kit.core.files import COPY_AGAIN

MAX_SIZE = 2**24
"""Largest size of a dimension, so that the number of bytes of a matrix does not overflow."""
MAX_LAYERS = 256
MAX_EXPERTS = 1024
MAX_POSITIONS = 2**31 - 1
MIN_NUMBER = 1e-15
MAX_NUMBER = 1e15


def read_size(
    config: dict[str, Any],
    key: str,
    where: str,
    default: int | None = None,
    *,
    least: int = 1,
    most: int = MAX_SIZE,
) -> int:
    """Read a whole number.

    Args:
        default: value of an absent key; None if it must be there.
        least: smallest number that is allowed.
        most: largest number that is allowed.

    Raises:
        UserError: the key is missing, or its value is another one.
    """
    value = _value_or(config, key, default)
    if type(value) is not int or not least <= value <= most:
        raise wrong_value(key, value, where, f"a whole number from {least} to {most}")
    return value


def read_number(config: dict[str, Any], key: str, where: str, default: float | None = None) -> float:
    """Read a positive number.

    Args:
        default: value of an absent key; None if it must be there.

    Raises:
        UserError: the key is missing, or its value is another one.
    """
    value = _value_or(config, key, default)
    if type(value) not in (int, float) or not MIN_NUMBER <= value <= MAX_NUMBER:
        raise wrong_value(key, value, where, f"a number from {MIN_NUMBER} to {MAX_NUMBER}")
    number: float = value
    return number


def read_numbers(config: dict[str, Any], key: str, where: str, count: int) -> tuple[float, ...]:
    """Read a list of ``count`` positive numbers. They are 1.0 where the key is absent.

    Raises:
        UserError: the value is another one.
    """
    values = _value_or(config, key, [1.0] * count)
    if not isinstance(values, list) or len(values) != count:
        raise wrong_value(key, values, where, f"a list of {count} numbers")
    return tuple(float(read_number({key: value}, key, where)) for value in values)


def read_flag(config: dict[str, Any], key: str, where: str, default: bool = False) -> bool:
    """Read true or false; ``default`` where the key is absent. Raises UserError for another value."""
    value = _value_or(config, key, default)
    if type(value) is not bool:
        raise wrong_value(key, value, where, "true or false")
    return value


def read_table(config: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    """Read an object, and copy it; empty where the key is absent. Raises UserError for another value."""
    value = _value_or(config, key, {})
    if not isinstance(value, dict):
        raise wrong_value(key, value, where, "an object")
    return dict(value)


def read_ids(config: dict[str, Any], key: str, where: str) -> tuple[int, ...]:
    """Read a whole number or a list of them; empty where the key is absent. Raises UserError for another
    value."""
    value = _value_or(config, key, [])
    ids = value if isinstance(value, list) else [value]
    if not all(type(number) is int and 0 <= number <= MAX_SIZE for number in ids):
        raise wrong_value(key, value, where, f"whole numbers from 0 to {MAX_SIZE}")
    return tuple(ids)


def read_architecture(config: dict[str, Any], where: str) -> str:
    """Read the first name of ``architectures``; a question mark where there is none. Raises UserError."""
    names = config.get("architectures") or ["?"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise wrong_value("architectures", names, where, "a list of names")
    return names[0]


def wrong_value(key: str, value: object, where: str, wanted: str) -> UserError:
    """Make the error for a missing key (``value`` None), or for a value that is not the ``wanted`` one."""
    if value is None:
        return UserError(f"The config.json in {where} has no {key!r}.", COPY_AGAIN)
    return UserError(f"The config.json in {where} says {key} {shown(value)} instead of {wanted}.", COPY_AGAIN)


def _value_or(config: dict[str, Any], key: str, default: Any) -> Any:
    """Value of ``key``; ``default`` where it is absent or null."""
    value = config.get(key)
    if value is None:
        return default
    return value
