"""Base classes of schemas: of sections of a YAML file, and of options that are given as keywords."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from eagle_kit.config.loading.keys import nearest_key
from eagle_kit.core.errors import UserError

MAX_NUMBER = 2**32 - 1
"""Largest whole number of a YAML file, also as a seed."""


class Section(BaseModel):
    """Section of a YAML file: frozen, without unknown keys, with numbers that are finite and fit 32 bits."""

    # Validators are built when first used: `--help` reads the texts alone.
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, defer_build=True
    )

    @field_validator("*")
    @classmethod
    def _fits(cls, value: Any) -> Any:
        if isinstance(value, int) and not -MAX_NUMBER <= value <= MAX_NUMBER:
            raise ValueError(f"the largest whole number is {MAX_NUMBER}")
        return value


class OptionError(UserError):
    """A value that an option does not take.

    Args:
        name: of the option; the cause begins with it.
        value: the value that was given.
        remedy: the allowed values, one sentence.
    """

    def __init__(self, name: str, value: Any, remedy: str) -> None:
        super().__init__(f"{name} is {value!r}.", remedy)
        self.name = name


class Options(BaseModel):
    """Set of options. The text under a field is its documentation and the help of its flag.

    Raises:
        UserError: an unknown name or a wrong value.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, defer_build=True
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _for_user(error, type(self)) from None

    @classmethod
    def help_of(cls, name: str) -> str:
        """Documentation of a field, on one line."""
        return " ".join((cls.model_fields[name].description or "").split())

    @classmethod
    def remedy_of_unknown(cls, name: str) -> str:
        """Remedy for a name that is no option."""
        known = list(cls.model_fields)
        near = nearest_key(name, known)
        if near is None:
            return f"Use {', '.join(known)}."
        return f"Did you mean {near}?"

    def replace(self, **values: Any) -> Self:
        """Copy the options with other ``values``, validated again."""
        return type(self)(**{**dict(self), **values})


def _for_user(error: ValidationError, schema: type[Options]) -> UserError:
    """The error for a validation that failed: that of a validator, or one for all unknown names, or one for
    the first wrong value."""
    # A validator has raised it.
    problems = error.errors()
    first = problems[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, UserError):
        return cause

    # There are unknown names.
    unknown = []
    for problem in problems:
        if problem["type"] == "extra_forbidden":
            unknown.append(".".join(map(str, problem["loc"])))
    if len(unknown) > 1:
        remedies = [f"{name}: {schema.remedy_of_unknown(name)}" for name in unknown]
        return UserError(f"There are no options {', '.join(unknown)}.", " ".join(remedies))
    if unknown:
        return UserError(f"There is no option {unknown[0]}.", schema.remedy_of_unknown(unknown[0]))

    # A value is wrong.
    name = ".".join(map(str, first["loc"][:1]))
    return OptionError(name, first["input"], f"{first['msg']}.")
