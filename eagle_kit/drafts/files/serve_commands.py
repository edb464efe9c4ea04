"""Commands that serve a draft: by our engine, by SGLang, by vLLM; or why there is none.

Flags are those of SGLang 0.5.23 (``sglang/srt/arg_groups/fields/spec.py``) and vLLM 0.32.0
(``vllm/config/speculative.py``).
"""

import json
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

from eagle_kit.core.shape import SpecShape
from eagle_kit.drafts.base.kind import HeadKind
from eagle_kit.drafts.files.formats import CHECKED_VERSIONS

ENGINES = {"sglang": "SGLang", "vllm": "vLLM"}


class DraftInfo(NamedTuple):
    """Subject of the commands.

    Attributes:
        shape: the one that they ask for.
        format: the layout of ``folder``.
        folder: of the draft, as the commands name it.
        target: ``--target`` with its value where the commands need it, or empty.
        hub_id: name of the target for other engines.
    """

    kind: HeadKind[Any, Any, Any]
    shape: SpecShape
    format: str
    folder: str
    target: str
    hub_id: str


def serve_commands(draft: DraftInfo, reasons: Mapping[str, str]) -> str:
    """Markdown.

    Args:
        reasons: why an engine cannot serve it, by the engine's format; engines that can are left out.
    """
    folder = shlex.quote(draft.folder)
    prompt = f"eagle-kit generate{draft.target} --draft {folder} --shape {draft.shape}"
    parts = [
        f"This engine:\n\n```sh\n{prompt} --prompt 'Why is the sky blue?'\n"
        f"eagle-kit serve {folder}{draft.target}\n```"
    ]
    for engine, name in ENGINES.items():
        if engine in reasons:
            parts.append(f"{name}: {reasons[engine]}")
            continue
        place = draft.folder
        first = ""
        if draft.format != engine:
            place = f"{draft.folder}-{engine}"
            first = f"eagle-kit export {folder} --format {engine} --out {shlex.quote(place)}\n"
        command = _sglang(draft, place) if engine == "sglang" else _vllm(draft, place)
        parts.append(
            f"{name} (flags of version {CHECKED_VERSIONS[engine]}; not tried, nothing here has started that "
            f"server):\n\n```sh\n{first}{command}\n```"
        )
    return "\n\n".join(parts)


def _sglang(draft: DraftInfo, folder: str) -> str:
    kind = draft.kind
    shape = draft.shape
    return (
        f"python -m sglang.launch_server --model-path {draft.hub_id} "
        f"--speculative-algorithm {kind.algorithm} \\\n"
        f"    --speculative-draft-model-path {shlex.quote(folder)} \\\n"
        f"    --speculative-num-steps {shape.steps} --speculative-eagle-topk {shape.topk} "
        f"--speculative-num-draft-tokens {shape.tokens}"
    )


def _vllm(draft: DraftInfo, folder: str) -> str:
    """vLLM drafts chains; of a tree's steps a chain as long is rarely worth the last one."""
    kind = draft.kind
    shape = draft.shape
    count = shape.steps if shape.topk == 1 else shape.steps - 1
    config = {"method": kind.vllm_method, "model": folder, "num_speculative_tokens": count}
    return f"vllm serve {draft.hub_id} --speculative-config '{json.dumps(config | dict(kind.vllm_options))}'"
