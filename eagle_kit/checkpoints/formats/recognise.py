"""Which layout a draft has: whose trainer wrote it, for whom, and which numbering of layers it means."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from safetensors import SafetensorError, safe_open

from eagle_kit.checkpoints.draft import OLD_WEIGHTS, WEIGHTS, read_draft_tensors
from eagle_kit.checkpoints.formats.eagle3 import is_usual
from eagle_kit.checkpoints.formats.files import FORMATS, OWN, PEERS, Format
from eagle_kit.checkpoints.kind import algorithm_of
from eagle_kit.checkpoints.layout import CONVENTION, LAYER_IDS, flatten_config, refuse_other_parts
from eagle_kit.core.errors import UserError
from eagle_kit.models.loading.loader import read_json

Kind = Literal["eagle3", "eagle1", "mtp"]
MODELOPT_KEYS = ("use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm")
OTHERS = {
    "medusa": "Medusa heads",
    "dflash": "a DFlash draft",
    "peagle": "a P-EAGLE draft",
    "dspark": "a DSpark draft",
    "mlpspeculator": "an MLP speculator",
    "eagle3qwen3": "an EAGLE-3 head with a Qwen3 layer, which norms queries and keys",
    "eaglellama4": "an EAGLE head with a Llama 4 layer",
    "llama4forcausallmeagle": "an EAGLE head with a Llama 4 layer",
}
"""Parts of names of architectures -> what they are."""


class Layout(NamedTuple):
    """What was seen.

    Attributes:
        kind: of head.
        format: None when nothing tells SGLang's numbering of layers from that of EAGLE and vLLM.
        maker: whose layout it is, and by what that was seen, for people.
    """

    kind: Kind
    format: Format | None
    maker: str


def recognise(folder: str | Path) -> Layout:
    """Look at ``config.json`` and the names of the tensors.

    Raises:
        UserError: another architecture than ours, with the reason; a folder that cannot be read.
    """
    folder = Path(folder)
    algorithm = algorithm_of(folder)
    config = read_json(folder / "config.json")
    refuse_other_heads(config, folder)
    names = tensor_names(folder)
    own = config.get(OWN)
    written = own.get("format", "eagle-kit") if isinstance(own, dict) else None
    if written is not None and written not in FORMATS:
        raise UserError(
            f"The draft in {folder} says that eagle-kit wrote it in the format {written!r}.",
            f"Known formats are {', '.join(FORMATS)}; use the version of eagle-kit that wrote it.",
        )
    ours = None
    if written is not None:
        ours = f"ours, for {PEERS[written]}" if written in PEERS else "ours"
    match algorithm:
        case "EAGLE3":
            refuse_other_parts(flatten_config(config, str(folder)), names, str(folder))
            found, maker = _eagle3(config, names)
            return Layout("eagle3", written or found, ours or maker)
        case "EAGLE":
            found, maker = _eagle1(config)
            return Layout("eagle1", written or found, ours or maker)
        case "NEXTN":
            return Layout("mtp", written or "sglang", ours or "DeepSeek's NextN modules, as SGLang has them")
        case "STANDALONE":
            raise UserError(
                f"The model in {folder} ({(config.get('architectures') or ['?'])[0]}) is a whole model, not "
                "a draft head.",
                "A whole model drafts as it is, and modules of MTP are served out of their target's folder.",
            )


def _eagle3(config: dict[str, Any], names: set[str]) -> tuple[Format | None, str]:
    """Layouts of EAGLE-3 differ in names; what matters is how they number layers."""
    if "speculators_model_type" in config:
        return "speculators", f"speculators {config.get('speculators_version', '')}".rstrip()
    eagle = config.get("eagle_config") or {}
    ids, convention = eagle.get(LAYER_IDS), eagle.get(CONVENTION)
    is_layers = any(name.removeprefix("model.").startswith("layers.0.") for name in names)
    if any(key in eagle for key in MODELOPT_KEYS) or (is_layers and "t2d" not in names and "d2t" in names):
        maker = "ModelOpt (layers.0.*, no t2d)"
    elif is_layers:
        maker = "vLLM (layers.0.*)"
    elif not ids:
        maker = "EAGLE (midlayer.*, no layer ids)"
    else:
        maker = "SpecForge or SGLang (midlayer.*, layer ids)"
    if convention in ("input", "output"):
        return ("vllm" if convention == "input" else "sglang"), f"{maker}, {convention} of layer i"
    if not ids:
        return "eagle", maker
    if is_usual(ids):
        return "vllm", f"{maker}, input of layer i"
    if is_usual(ids, 1):
        return "sglang", f"{maker}, output of layer i"
    return None, maker


def _eagle1(config: dict[str, Any]) -> tuple[Format, str]:
    name = (config.get("architectures") or ["?"])[0]
    if name == "LlamaForCausalLMEagle":
        return "sglang", "EAGLE-1, as SGLang names it"
    if name.startswith("Eagle"):
        return "vllm", "EAGLE-1, as vLLM names it"
    return "eagle", f"EAGLE-1, as EAGLE's repository has it ({name} with an fc)"


def refuse_other_heads(config: dict[str, Any], folder: Path) -> None:
    """Raise UserError for heads of a kind that we do not have."""
    words = [*(config.get("architectures") or [])]
    words += [config.get("model_type"), config.get("speculators_model_type")]
    text = " ".join(str(word).lower() for word in words if word)
    for part, what in OTHERS.items():
        if part in text:
            raise UserError(
                f"The draft in {folder} is {what} ({words[0]}), which eagle-kit does not run.",
                "Serve it with the engine it was made for, or train an EAGLE-3 head.",
            )


def tensor_names(folder: Path) -> set[str]:
    """Names of the tensors of a draft, without reading them where the file allows it."""
    if (folder / WEIGHTS).is_file():
        try:
            with safe_open(folder / WEIGHTS, framework="pt") as file:
                return set(file.keys())
        except (SafetensorError, OSError):
            return set()  # the loader says what is wrong with it
    if (folder / WEIGHTS).is_file() or (folder / OLD_WEIGHTS).is_file():
        return set(read_draft_tensors(folder))
    shards = sorted(folder.glob("*.safetensors"))
    return _names_of_shards(shards)


def _names_of_shards(shards: Iterable[Path]) -> set[str]:
    names: set[str] = set()
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            names |= set(file.keys())
    return names
