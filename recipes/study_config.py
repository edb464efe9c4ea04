"""Schema of a study: training runs that differ in named settings, over several seeds. Torch-free."""

from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from eagle_kit.config.options import Section
from eagle_kit.core.shape import SpecShape


class Arm(Section):
    """One way to train."""

    config: str | None = None
    """Training config, relative to the study's file; null is the study's ``base``."""

    set: dict[str, Any] = Field(default_factory=dict)
    """Its settings, ``section.key`` to value; they win over ``common``."""

    choose: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    """One setting and the values among which the first seed decides: it is trained with each, and the one
    whose best validation has the longest accept length (of its first shape, on held-out prompts) is
    the arm's for all seeds.
    """

    about: str = ""
    """One line for the table."""

    @field_validator("choose")
    @classmethod
    def _one_setting_has_values(cls, choose: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        if len(choose) > 1:
            raise ValueError("name one setting")
        for values in choose.values():
            names = {str(value) for value in values if isinstance(value, int | float | str)}
            if len(values) < 2 or len(names) < len(values) or any("/" in name for name in names):
                raise ValueError("give two or more different numbers or words, which name folders")
        return choose

    @model_validator(mode="after")
    def _settings_are_given_once(self) -> Self:
        if both := self.set.keys() & self.choose.keys():
            raise ValueError(f"{min(both)} is set and chosen")
        return self


class Measure(Section):
    """Settings of the comparison, as ``eagle-kit eval`` takes them."""

    tasks: tuple[str, ...] = ("human_eval", "ours")
    """Sets of prompts, by name or file."""

    shapes: tuple[str, ...] = ("4,1,5", "5,4,16")
    """Speculation shapes that are tried with every head."""

    limit: int | None = Field(default=16, ge=1)
    """Prompts of each task; null is all."""

    max_tokens: int = Field(default=64, ge=2)
    """Most tokens of a response."""

    batch_size: int = Field(default=8, ge=1)
    """Prompts decoded together, which changes no accept length."""

    max_context: int | None = Field(default=1024, ge=16)
    """Most tokens of prompt and response: a short one keeps the engines of many heads small."""

    seed: int = Field(default=0, ge=0)
    """Of the draw of prompts."""

    @field_validator("shapes")
    @classmethod
    def _shapes_parse(cls, shapes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(SpecShape.parse(shape)) for shape in shapes)


class StudyConfig(Section):
    """A study."""

    base: str
    """Training config, relative to the study's file."""

    prepare: dict[str, str] = Field(default_factory=dict)
    """Files and folders that the runs read, and the command of ours that makes each one, without ``--out``.
    It runs when the file is not there, and goes on when it was interrupted. Commands of one name in a row run
    together with ``--jobs``, others may read the files before them.
    """

    output_dir: str
    """A folder with one run per arm and seed, the exported heads, and the results."""

    seeds: tuple[int, ...] = (0,)
    """Every arm is trained with each."""

    common: dict[str, Any] = Field(default_factory=dict)
    """Settings of all arms: the data, and what makes the tokens equal."""

    arms: dict[str, Arm]
    """By name; the first is what the others are compared with."""

    measure: Measure = Measure()
    """Settings of the comparison."""

    @field_validator("seeds")
    @classmethod
    def _seeds_differ(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
            raise ValueError("give one or more different seeds, each >= 0")
        return seeds

    @field_validator("arms")
    @classmethod
    def _arms_have_names(cls, arms: dict[str, Arm]) -> dict[str, Arm]:
        if not arms:
            raise ValueError("name at least one arm")
        if any("seed" in {*arm.set, *arm.choose} for arm in arms.values()):
            raise ValueError("name seeds under seeds, for all arms")
        if bad := [name for name in arms if not name.replace("-", "").replace(".", "").isalnum()]:
            raise ValueError(f"the name {bad[0]!r} of an arm is to be letters, digits, points and dashes")
        return arms
