"""Architecture of a head by its tensors, for configs that do not state it or copy the target's."""

import re

from eagle_kit.drafts.files.draft_files import DraftFiles

OLDER_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
LAYER_NUMBER = re.compile(r"layers\.(\d+)\.")


def canonical_name(name: str) -> str:
    """EAGLE's name for any spelling: ``midlayer.*`` or ``layers.0.*``, with ``model.`` or without; SGLang's
    older ``aux_norm_*`` are ``fc_norm.*``."""
    name = name.removeprefix("model.")
    module, _, leaf = name.partition(".")
    if module in OLDER_NORMS:
        return f"fc_norm.{OLDER_NORMS.index(module)}.{leaf}"
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def canonical_names(files: DraftFiles) -> dict[str, str]:
    """EAGLE's name of every tensor -> its name in ``files``; empty where the tensors cannot be read."""
    return {canonical_name(name): name for name in files.names}


def count_layers(files: DraftFiles) -> int | None:
    """Decoder layers that have tensors; None where the tensors cannot be read."""
    names = canonical_names(files)
    found = {0 for name in names if name.startswith("midlayer.")}
    found |= {int(match[1]) for name in names if (match := LAYER_NUMBER.match(name))}
    return len(found) or None


def num_layers(files: DraftFiles, stated: int, copied: tuple[object, ...]) -> int:
    """Decoder layers of a head that may have several: those that have tensors.

    Args:
        stated: number in the config. Where fewer have tensors the head is cut off, and this one is returned,
            unless it is in ``copied``.
        copied: numbers that are the target's.
    """
    found = count_layers(files)
    is_cut = found is not None and found < stated and stated not in copied
    return stated if found is None or is_cut else found


def fuses_states(files: DraftFiles) -> bool:
    """True for the layer of EAGLE-3: it has a norm of the feature beside that of the embedding, and its
    attention reads both."""
    return "midlayer.hidden_norm.weight" in canonical_names(files)


def drafts_blocks(files: DraftFiles) -> bool:
    """True for DFlash and DSpark: a norm after ``fc``, and layers that norm queries and keys but have no
    norm of a feature."""
    names = canonical_names(files).keys()
    needed = {"fc.weight", "hidden_norm.weight", "midlayer.self_attn.k_norm.weight"}
    return needed <= names and "midlayer.hidden_norm.weight" not in names


def joins_embedding(files: DraftFiles) -> bool:
    """True for EAGLE-1: ``fc`` reads a state and an embedding of its own output's width, in front of a plain
    layer."""
    names = canonical_names(files)
    shape = files.shape_of(names["fc.weight"]) if "fc.weight" in names else None
    has_layer = "midlayer.self_attn.q_proj.weight" in names
    # DFlash, whose fc may be as wide, has a norm after it.
    others = {"midlayer.hidden_norm.weight", "hidden_norm.weight"} & names.keys()
    return shape is not None and len(shape) == 2 and has_layer and not others and shape[1] == 2 * shape[0]
