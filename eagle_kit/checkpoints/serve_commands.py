"""How a draft is served: by our engine, by SGLang, by vLLM; or why it cannot be.

Flags are those of SGLang 0.5.23 (``sglang/srt/arg_groups/fields/spec.py``) and vLLM 0.32.0
(``vllm/config/speculative.py``).
"""

from collections.abc import Mapping
from typing import NamedTuple

from eagle_kit.checkpoints.formats.files import CHECKED_VERSIONS

ENGINES = {"sglang": "SGLang", "vllm": "vLLM"}


class DraftInfo(NamedTuple):
    """What the commands are about: ``kind`` is eagle3, eagle1 or mtp, ``format`` the layout of ``folder``."""

    kind: str
    format: str
    folder: str
    target: str
    hub_id: str
    num_modules: int = 1


def serve_commands(draft: DraftInfo, reasons: Mapping[str, str]) -> str:
    """Markdown.

    Args:
        reasons: why an engine cannot serve it, by the engine's format; engines that can are left out.
    """
    steps = 5 if draft.kind != "mtp" else 3 if draft.num_modules == 1 else draft.num_modules
    shape = f"{steps},1,{steps + 1}" if draft.kind == "mtp" else "5,4,16"
    prompt = f"eagle-kit generate --target {draft.target} --draft {draft.folder} --shape {shape}"
    parts = [
        f"This engine:\n\n```sh\n{prompt} --prompt 'Why is the sky blue?'\n"
        f"eagle-kit serve --target {draft.target} --draft {draft.folder}\n```"
    ]
    for engine, name in ENGINES.items():
        if engine in reasons:
            parts.append(f"{name}: {reasons[engine]}")
            continue
        folder, first = draft.folder, ""
        if draft.format != engine:
            folder = f"{draft.folder}-{engine}"
            first = f"eagle-kit export {draft.folder} --format {engine} --out {folder}\n"
        command = _sglang(draft, folder, steps) if engine == "sglang" else _vllm(draft, folder, steps)
        parts.append(
            f"{name} (flags of version {CHECKED_VERSIONS[engine]}; not tried, nothing here has started that "
            f"server):\n\n```sh\n{first}{command}\n```"
        )
    return "\n\n".join(parts)


def _sglang(draft: DraftInfo, folder: str, steps: int) -> str:
    algorithm = {"eagle3": "EAGLE3", "eagle1": "EAGLE", "mtp": "NEXTN"}[draft.kind]
    topk, tokens = (1, steps + 1) if draft.kind == "mtp" else (4, 16)
    return (
        f"python -m sglang.launch_server --model-path {draft.hub_id} --speculative-algorithm {algorithm} \\\n"
        f"    --speculative-draft-model-path {folder} \\\n"
        f"    --speculative-num-steps {steps} --speculative-eagle-topk {topk} "
        f"--speculative-num-draft-tokens {tokens}"
    )


def _vllm(draft: DraftInfo, folder: str, steps: int) -> str:
    method = {"eagle3": "eagle3", "eagle1": "eagle", "mtp": "mtp"}[draft.kind]
    count = steps if draft.kind == "mtp" else 4
    config = f'{{"method": "{method}", "model": "{folder}", "num_speculative_tokens": {count}}}'
    return f"vllm serve {draft.hub_id} --speculative-config '{config}'"
