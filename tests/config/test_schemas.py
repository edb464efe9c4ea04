"""Keys, defaults and limits of every config file, as the files in ``schemas/`` have them.

A default that changes makes another run of the same YAML file. It also changes a run that began before: a
resumed run takes the defaults of settings that its ``run.yaml`` does not have. Where a change is meant, write
the files again and say why in the commit:

    REFRESH_SCHEMAS=1 python -m pytest tests/config/test_schemas.py
"""

import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from eagle_kit.config.diagnose import DiagnoseConfig
from eagle_kit.config.drafts import HEADS
from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.eval import EvalConfig
from eagle_kit.config.server import ServerConfig
from eagle_kit.config.train import TrainConfig
from eagle_kit.config.training import TrainingConfig
from recipes.pretrain_config import PretrainConfig
from recipes.study_config import StudyConfig

FOLDER = Path(__file__).with_name("schemas")
REFRESH = "REFRESH_SCHEMAS"
SCHEMAS = {
    "train": TrainConfig,
    "pretrain": PretrainConfig,
    "study": StudyConfig,
    "engine": EngineConfig,
    "server": ServerConfig,
    "eval": EvalConfig,
    "diagnose": DiagnoseConfig,
}


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The schemas that a value of ``annotation`` may be of or hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]


def shown_type(annotation: Any) -> str:
    """``annotation`` as one reads it in the source."""
    if annotation is type(None):
        return "None"
    if get_origin(annotation) in (Union, types.UnionType):
        return " | ".join(shown_type(part) for part in get_args(annotation))
    is_class = isinstance(annotation, type) and get_origin(annotation) is None
    return annotation.__name__ if is_class else str(annotation).replace("typing.", "")


def shown_field(field: FieldInfo) -> str:
    """Type, default and limits of a field."""
    default = field.get_default(call_default_factory=True)
    shown_default = "required" if field.is_required() else repr(default)
    if isinstance(default, BaseModel):
        shown_default = repr(default.model_dump(exclude_defaults=True))
    limits = [str(limit) for limit in field.metadata if "Validator" not in str(limit)]
    return " ".join([shown_type(field.annotation), "=", shown_default, *limits])


def lines_of(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """A line for every key of ``schema``, those of its sections included."""
    for name, field in schema.model_fields.items():
        if schema is TrainConfig and name == "head":
            yield from lines_of_heads()
            continue
        yield f"{prefix}{name}: {shown_field(field)}".replace("eagle_kit.", "")
        for section in models_in(field.annotation):
            yield from lines_of(section, f"{prefix}{name}.")


def lines_of_heads() -> Iterator[str]:
    """A line for every key of ``head`` of each kind, and for what a kind adds to ``training``."""
    for kind, head in HEADS.items():
        yield from lines_of(head, f"head of {kind}.")
        common = [line.partition(": ")[0] for line in lines_of(TrainingConfig)]
        for line in lines_of(head.training_schema):
            if line.partition(": ")[0] not in common:
                yield f"training of {kind}.{line}"


@pytest.mark.parametrize("name", SCHEMAS)
def test_keys_defaults_and_limits_are_those_of_the_file(name: str) -> None:
    found = list(lines_of(SCHEMAS[name]))
    path = FOLDER / f"{name}.txt"
    if os.environ.get(REFRESH):
        path.write_text("\n".join(found) + "\n", encoding="utf-8")
    assert found == path.read_text(encoding="utf-8").splitlines()
