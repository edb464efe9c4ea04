"""What a target, a draft and a device decide of the options of an engine, and what they refuse."""

import logging
import re
import warnings
from pathlib import Path
from typing import Any

import torch

from eagle_kit.config.engine import EngineConfig, ResolvedConfig
from eagle_kit.core.errors import UserError
from eagle_kit.drafts.files.draft import AnyDraft, drafts_in_target
from eagle_kit.drafts.registry import algorithms, kind_in_target
from eagle_kit.models.targets.target import Target


def is_ngram(draft: Any) -> bool:
    """True for the name by which drafts out of earlier text are asked for in place of a draft."""
    return isinstance(draft, str) and draft.upper() == "NGRAM"


def draft_in_target(draft: Any, algorithm: str, target_name: str | Path | None) -> AnyDraft | None:
    """The draft that ``algorithm`` finds in the target's folder where none is given: the folder itself for
    modules of MTP, or the only folder in it that holds such a draft. None where no draft is needed.

    Raises:
        UserError: an unknown algorithm; one that takes no draft beside one, or that has none, or several.
    """
    # Refuse what does not go together.
    known = ("auto", *algorithms(), "NGRAM", "NONE")
    if algorithm not in known:
        raise UserError(f"The algorithm {algorithm!r} is not known.", f"Use one of {', '.join(known)}.")
    if algorithm in ("NGRAM", "NONE") and draft is not None:
        raise UserError(
            f"The algorithm {algorithm} takes no draft, and {draft} was given.",
            "Leave the draft out, or the algorithm.",
        )
    if draft is not None or algorithm not in algorithms():
        return None

    # A draft in a folder of its own inside the target's.
    if kind_in_target(algorithm) is None:
        found = [] if target_name is None else drafts_in_target(target_name, algorithm)
        if not found:
            raise UserError(f"The algorithm {algorithm} needs a draft.", "Give a draft, or choose NGRAM.")
        if len(found) > 1:
            names = ", ".join(each.path.name for each in found)
            raise UserError(
                f"The target's folder holds several drafts for {algorithm} ({names}).",
                "Give one of these folders as the draft.",
            )
        return found[0]

    # Modules in the target's own files.
    if target_name is None:
        raise UserError(
            f"{algorithm} without a draft takes the modules in the target's folder: none is known.",
            "Give the target as a folder, or a draft.",
        )
    return target_name


def without_graphs(options: EngineConfig, target: Target) -> EngineConfig:
    """Turn graphs off for a target whose forward cannot be captured, which is logged. Raise UserError where
    they were asked for."""
    if options.graph_mode == "off" or (reason := target.host_read()) is None:
        return options
    if options.graph_mode is not None:
        raise UserError(
            f"The code of this {target.config.model_type} reads numbers on the host ({reason}), so that its "
            "cycles cannot be captured.",
            "Give --graph-mode off.",
        )
    logging.getLogger(__name__).warning(
        "The code of this %s reads numbers on the host (%s): cycles run without graphs.",
        target.config.model_type,
        reason,
    )
    return options.replace(graph_mode="off")


def fit_context(config: ResolvedConfig, steps: int, *, warns: bool = True) -> ResolvedConfig:
    """Shorten the context to what one request alone, with drafts of ``steps`` or of its shape, may have of
    the pool.

    Args:
        warns: whether to warn of a shorter context, which was asked for as it is.

    Raises:
        UserError: the pool holds no request.
    """
    most = context_of_pool(config, steps)
    if most < 2:
        raise UserError(
            f"The key-value pool holds {config.kv_tokens} tokens, too few for any request.",
            "Give it more, or free memory.",
        )
    if most >= config.max_context:
        return config
    if warns:
        warnings.warn(
            f"The key-value pool holds {config.kv_tokens} tokens, so the context is {most} instead of "
            f"{config.max_context}.",
            stacklevel=4,
        )
    return config.replace(max_context=most)


def context_of_pool(config: ResolvedConfig, steps: int) -> int:
    """Tokens that one request alone, with drafts of ``steps`` or of its shape, may have of the pool."""
    most_steps = max(config.shape.at(1).steps, steps)
    pool_tokens = config.num_shard_pages * config.page_size
    return pool_tokens - config.num_lookahead_tokens(most_steps)


def dtype_of(name: str, device: str) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def check_fp8(device: torch.device) -> None:
    """Raise UserError for a GPU that cannot read keys and values in fp8."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise UserError(
            "Keys and values in fp8 need a GPU of compute capability 8.9 (Ada, Hopper) or later.",
            "Leave the key-value dtype at auto.",
        )


def choose_device(name: str) -> str:
    """Choose the device of ``name`` on this machine. Raise UserError for one that does not exist."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if re.fullmatch("(cpu|cuda)(:[0-9]+)?", name) is None:
        raise UserError(f"The device {name!r} is not known.", "Use cpu, cuda or auto.")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"The device {name} was asked for, but CUDA is not there.", "Use cpu or auto.")
    if name.startswith("cuda:") and int(name[5:]) >= (count := torch.cuda.device_count()):
        raise UserError(
            f"The device {name} was asked for, and there are {count} CUDA devices.",
            f"Use one of cuda:0 to cuda:{count - 1}.",
        )
    return name


def devices_of(name: str, count: int) -> list[torch.device]:
    """Devices of the ``count`` ranks of this machine: those of a list such as ``cuda:2,cuda:3``; of
    ``cuda`` those of their numbers.

    Raises:
        UserError: a list of another length, or one with a device that is not there, that two ranks would
            share, or of another type than the others.
    """
    names = name.split(",")
    if len(names) not in (1, count):
        ranks = "rank" if count == 1 else "ranks"
        raise UserError(
            f"{len(names)} devices were given for {count} {ranks}.",
            "Give one for each, or cuda, cpu or auto.",
        )
    found = [torch.device(choose_device(each)) for each in names * (count // len(names))]
    if name in ("auto", "cuda") and found[0].type == "cuda" and count > 1:
        if count > (there := torch.cuda.device_count()):
            raise UserError(
                f"{count} ranks need a device each, and there are {there} CUDA devices.",
                "Use fewer ranks, or start them on several machines with torchrun.",
            )
        return [torch.device("cuda", i) for i in range(count)]
    if len({device.type for device in found}) > 1:
        raise UserError(f"The devices {name} are of several types.", "Give GPUs for all ranks, or cpu.")
    gpus = [device for device in found if device.type == "cuda"]
    if count > 1 and (len(set(gpus)) < len(gpus) or any(gpu.index is None for gpu in gpus)):
        raise UserError(
            f"With the device {name} two of {count} ranks would share a GPU.",
            "Give cuda, or as many different ones as there are ranks, such as cuda:0,cuda:1.",
        )
    return found
