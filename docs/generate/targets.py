"""``targets.md``: architectures that are written here, that run through the bridge, and that are refused."""

import importlib.util
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from eagle_kit.models.bridge.config import REFUSED
from eagle_kit.models.config import FAMILIES
from eagle_kit.models.loading.source import PACKAGED_TARGETS
from generate.markdown import PACKAGE, table, wrapped

PUBLIC = PACKAGE / "models" / "loading" / "public_targets"
TESTED = Path(__file__).parents[2] / "tests" / "support" / "families.py"
"""Tiny models of families of transformers, which tests hold to transformers' own forward."""
FEATURES = {
    "sliding windows": ("sliding_window",),
    "chunks": ("attention_chunk_size",),
    "soft cap of scores": ("attn_logit_softcapping",),
    "soft cap of logits": ("final_logit_softcapping",),
    "factor of logits": ("logit_scale", "logits_scaling", "lm_head_multiplier"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "latent attention": ("kv_lora_rank",),
}
"""Feature -> keys of a config that has it."""
AT_LOAD = (
    "The model's class takes no attention function from outside (`falcon`, `gptj`, `gpt_neo`).",
    "Values are wider than keys, because the store has one width.",
    "A family that is written here has `partial_rotary_factor`, and its rotation is of whole heads.",
    "A family that is written here has layers with different `rope_parameters`.",
    "A packed forward differs from the model's own forward. The check names the difference.",
    "The code of the model or of its tokenizer is in its repository: `trust_remote_code` is always off.",
    "Weights have a quantisation other than fp8 and MXFP4.",
)
"""Reasons for which loading refuses a target, besides its type."""


def targets_page() -> str:
    """Families that are written here, families behind the bridge, refused ones, and public targets."""
    written = (
        "Written by `make reference` from the registries of `eagle_kit/models` and from "
        "`tests/support/families.py`. [Add a target](../how-to/add-a-target.md) has the steps for another "
        "family."
    )
    lines = ["# Targets", "", *wrapped(written)]

    # Families with code of their own.
    lines += ["", "## Written here", ""]
    rows = [(f"`{name}`", f"`{kind}`") for name, kind in FAMILIES.items()]
    lines += wrapped("The name is the one of `architectures` in the target's `config.json`.")
    lines += ["", *table(("architecture", "family"), rows)]

    # Families that run as transformers has them.
    lines += ["", "## Through the bridge", ""]
    about = (
        "Any other causal language model of `transformers` runs through `eagle_kit/models/bridge`: its own "
        "code, with our attention and recurrence. Loading compares a packed forward with the model's own "
        "forward and refuses a model that differs. Tests hold these types of models to `transformers`:"
    )
    lines += [*wrapped(about), "", *table(("`model_type`", "besides causal attention"), _tested_rows())]

    # Models that cannot be a target.
    lines += ["", "## Refused by type", ""]
    rows = [(f"`{kind}`", reason) for kind, reason in REFUSED.items()]
    lines += table(("`model_type`", "the model"), rows)
    lines += ["", "## Refused when loaded", ""]
    for reason in AT_LOAD:
        lines += wrapped(f"* {reason}", indent="  ")

    # Models whose configs the package carries.
    lines += ["", "## Public targets with known sizes", ""]
    packaged = ", ".join(f"`{name}`" for name in PACKAGED_TARGETS)
    about = (
        "`eagle-kit train --plan` and `eagle-kit serve --plan` know the sizes of these targets without a "
        f"network. A Python package has the weights of {packaged}."
    )
    lines += wrapped(about)
    lines += ["", *table(("hub id", "architecture", "read", "parameters"), _public_rows())]
    return "\n".join(lines) + "\n"


def _tested_rows() -> list[tuple[str, str]]:
    """Types of models with the same features are in one row."""
    spec = importlib.util.spec_from_file_location("families", TESTED)
    assert spec is not None and spec.loader is not None
    families = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(families)
    by_features: dict[str, list[str]] = defaultdict(list)
    for kind, config in families.FAMILIES.items():
        by_features[_features(config, is_hybrid=kind in families.HYBRIDS)].append(kind)
    rows = []
    for features, kinds in by_features.items():
        rows.append((", ".join(f"`{kind}`" for kind in sorted(kinds)), features))
    return rows


def _features(config: dict[str, Any], *, is_hybrid: bool) -> str:
    """Features of a config, in words."""
    found = [name for name, keys in FEATURES.items() if any(config.get(key) for key in keys)]
    if is_hybrid:
        found.insert(0, "recurrent layers")
    return ", ".join(found)


def _public_rows() -> list[tuple[str, str, str, str]]:
    """A row for each hub id."""
    rows = []
    for path in sorted(PUBLIC.glob("*.json")):
        entry = json.loads(path.read_text(encoding="utf-8"))
        (architecture,) = entry["config"]["architectures"]
        reader = "written here" if architecture in FAMILIES else "bridge"
        for name in entry["names"]:
            billions = f"{entry['num_parameters'] / 1e9:.3g} B"
            rows.append((f"`{name}`", f"`{architecture}`", reader, billions))
    return rows
