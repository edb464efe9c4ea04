"""Exceptions whose messages are for users: mistakes that they can repair, and lost processes."""


class UserError(ValueError):
    """A mistake the user can repair.

    The command line prints it without a traceback and exits with code 2; the server answers HTTP 400.

    Args:
        cause: what was given and why it cannot be used, one sentence.
        remedy: what to do about it, one sentence.
    """

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(f"{cause} {remedy}")
        self.cause = cause
        self.remedy = remedy

    def __reduce__(self) -> tuple[type["UserError"], tuple[str, str]]:
        """Pickle the two sentences alone. A subclass is read back as UserError."""
        return UserError, (self.cause, self.remedy)


class TargetError(UserError):
    """A mistake in the choice of a target: there is none of that name, or a draft does not fit it."""


class RankLost(RuntimeError):
    """Another process of the group has ended, or does not answer; the message is a sentence for people."""


def in_seconds(count: float) -> str:
    """``"1 second"``, ``"2.5 seconds"``."""
    unit = "second" if count == 1 else "seconds"
    return f"{count:g} {unit}"


def first_line(error: BaseException) -> str:
    """First line of an error's message; the name of its type if the message is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def cut(text: str, most: int = 200) -> str:
    """``text``, or its first ``most`` characters and an ellipsis."""
    if len(text) <= most:
        return text
    return f"{text[:most]}..."


def shown(value: object) -> str:
    """``repr`` of a value that a user gave, cut to 60 characters."""
    text = repr(value)
    if len(text) <= 60:
        return text
    return f"{text[:57]}..."
