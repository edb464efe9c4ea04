"""Schema of a study: training runs that differ in named settings, over several seeds. Torch-free."""

from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from eagle_kit.config.options import Section
from eagle_kit.core.shape import SpecShape


class Arm(Section):
    """One way to train.

    Attributes:
        config: training config, relative to the study's file; null is the study's ``base``.
        set: its settings, ``section.key`` to value; they win over ``common``.
        choose: one setting and the values among which the first seed decides: it is trained with each, and
            the one whose best judgement has the longest accept length (of the judge's first shape, on
            held-out prompts) is the arm's for all seeds.
        about: one line for the table.
    """

    config: str | None = None
    set: dict[str, Any] = Field(default_factory=dict)
    choose: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    about: str = ""

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
    """Settings of the comparison, as ``eagle-kit eval`` takes them. The batch size changes no accept length;
    a short ``max_context`` keeps the engines of many heads small."""

    tasks: tuple[str, ...] = ("human_eval", "ours")
    shapes: tuple[str, ...] = ("4,1,5", "5,4,16")
    limit: int | None = Field(default=16, ge=1)
    max_tokens: int = Field(default=64, ge=2)
    batch_size: int = Field(default=8, ge=1)
    max_context: int | None = Field(default=1024, ge=16)
    seed: int = Field(default=0, ge=0)

    @field_validator("shapes")
    @classmethod
    def _shapes_parse(cls, shapes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(SpecShape.parse(shape)) for shape in shapes)


class StudyConfig(Section):
    """A study.

    Attributes:
        base: training config, relative to the study's file.
        prepare: files and folders that the runs read, and the command of ours that makes each one, without
            ``--out``. It runs when the file is not there, and goes on when it was interrupted. Commands
            of one name in a row run together with ``--jobs``, others may read the files before them.
        output_dir: a folder with one run per arm and seed, the exported heads, and the results.
        seeds: every arm is trained with each.
        common: settings of all arms: the data, and what makes the tokens equal.
        arms: by name; the first is what the others are compared with.
        measure: settings of the comparison.
    """

    base: str
    prepare: dict[str, str] = Field(default_factory=dict)
    output_dir: str
    seeds: tuple[int, ...] = (0,)
    common: dict[str, Any] = Field(default_factory=dict)
    arms: dict[str, Arm]
    measure: Measure = Measure()

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
