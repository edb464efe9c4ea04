"""Bases of schemas: of sections of a YAML file, and of options that are filled by keyword."""

import inspect
import re
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from eagle_kit.config.loading.keys import nearest_key
from eagle_kit.core.errors import UserError

MAX_NUMBER = 2**32 - 1
"""Largest whole number of a YAML file, also as a seed."""


class Section(BaseModel):
    """Section of a YAML file: frozen, without unknown keys, with numbers that are finite and fit 32 bits."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

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
        value: the one given.
        remedy: the allowed values, one sentence.
    """

    def __init__(self, name: str, value: Any, remedy: str) -> None:
        super().__init__(f"{name} is {value!r}.", remedy)
        self.name = name


class Options(BaseModel):
    """Set of options. The ``Attributes`` of a schema's docstring are also the help of its flags.

    Raises:
        UserError: an unknown name or a wrong value, whether the schema or a validator refuses it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _for_user(error, list(type(self).model_fields)) from None

    @classmethod
    def help_of(cls, name: str) -> str:
        """Documentation of a field, from the docstring."""
        text = inspect.getdoc(cls) or ""
        found = re.search(rf"^    {name}: (.*?)(?=^    \w+: |\Z)", text, re.MULTILINE | re.DOTALL)
        return " ".join(found[1].split()) if found is not None else ""

    def replace(self, **values: Any) -> Self:
        """Copy the options with other ``values``, validated again."""
        return type(self)(**{**dict(self), **values})


def _for_user(error: ValidationError, known: list[str]) -> UserError:
    problem = error.errors()[0]
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, UserError):
        return cause
    name = ".".join(map(str, problem["loc"][:1]))
    if problem["type"] == "extra_forbidden":
        near = nearest_key(name, known)
        return UserError(
            f"There is no option {name}.", f"Did you mean {near}?" if near else f"Use {', '.join(known)}."
        )
    return OptionError(name, problem["input"], f"{problem['msg']}.")
