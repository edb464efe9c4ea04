"""Heads that draft blocks, DFlash and DSpark: what they share on disk, in checks and in training.

Their authors name layers by their outputs (``target_layer_ids``, -1 is the embedding), speculators by their
inputs (``aux_hidden_state_layer_ids``), as we do: output of layer i is input of layer i + 1.

What the rows of a block predict is said by ``sample_from_anchor``: row k its own token, or, where it is true,
the next. The wrong one gives under one percent of acceptance and no error.
"""

from collections.abc import Iterable
from typing import Any, ClassVar, TypeVar

import torch

from eagle_kit.config.drafts.blocks import BlockHeadConfig
from eagle_kit.core.errors import UserError, shown
from eagle_kit.core.shape import SpecShape
from eagle_kit.drafts.base.conventions import Convention
from eagle_kit.drafts.base.initial_weights import check_start_from, check_vocab_size, init_output_layer
from eagle_kit.drafts.base.kind import (
    HeadKind,
    HeadTensors,
    InitContext,
    describe_attention,
    scale_final_norm,
)
from eagle_kit.drafts.dflash.head import DFlashConfig, DFlashHead, spread_layers
from eagle_kit.drafts.files import findings
from eagle_kit.drafts.files.config_json import layer_to_dict, partial_rotary_dim
from eagle_kit.drafts.files.draft_files import OUTPUT, OWN, DraftFiles, open_draft
from eagle_kit.drafts.files.findings import OWN_TARGET, Finding
from eagle_kit.drafts.files.structure import count_layers, drafts_blocks, num_layers
from eagle_kit.drafts.files.vocab import complete_map, map_fingerprint
from eagle_kit.models.config import TargetConfig, read_decoder
from eagle_kit.models.config_values import (
    MAX_LAYERS,
    MAX_POSITIONS,
    read_flag,
    read_size,
    read_table,
    wrong_value,
)
from eagle_kit.models.loading.loader import check_activation
from eagle_kit.models.targets.target import Target

FLAT_IDS, NESTED_IDS, TABLE = "target_layer_ids", "aux_hidden_state_layer_ids", "dflash_config"
ROWS, SLIDING_BOTH = "sample_from_anchor", "sliding_window_non_causal"
CAUSAL, SWA_SIZE = "causal", "swa_window_size"
LAYERS = "num_hidden_layers"
LAYER_TYPES = "layer_types"
SHIFTED = "shift_label"
"""ModelOpt's key for :data:`ROWS`."""
NEMO = "Qwen3DFlashDraftModel"
"""NeMo's class. In its layers with a sliding window the rows of a block attend to each other both ways."""
OF_BOTH_PLACES = ("block_size", "mask_token_id", FLAT_IDS, ROWS)
"""Keys that a config has at its top or in :data:`TABLE`."""
OTHER_HEADS = ("projector_type", "markov_rank", "markov_head_type", "conv_kernel_size", "selector_rank")
"""Keys of parts that a head may have beside its body."""
MAX_BLOCK = 64
Config = TypeVar("Config", bound=DFlashConfig)
Head = TypeVar("Head", bound=DFlashHead)
Settings = TypeVar("Settings", bound=BlockHeadConfig)


class BlockKind(HeadKind[Config, Head, Settings]):
    """Kinds whose heads draft blocks after the target's states, with Qwen3 layers.

    Attributes:
        architecture: its name in configs of its authors.
        speculator: in those of the speculators project.
        other_architectures: in those of other trainers.
        keys_of_both_places: keys that a config has at its top or in :data:`TABLE`.
        known_parts: keys of :data:`OTHER_HEADS` that it has.
    """

    architecture: ClassVar[str]
    speculator: ClassVar[str]
    other_architectures: ClassVar[tuple[str, ...]] = ()
    keys_of_both_places: ClassVar[tuple[str, ...]] = OF_BOTH_PLACES
    known_parts: ClassVar[frozenset[str]] = frozenset()

    def recognises(self, files: DraftFiles) -> bool:
        """See :class:`~eagle_kit.drafts.base.kind.DraftKind`; by its tensors, whatever its architecture
        is."""
        stated = files.config.get("speculators_model_type")
        if stated is not None:
            return bool(stated == self.name)
        known = (self.architecture, self.speculator, *self.other_architectures)
        return files.architecture in known or self.has_tensors(files)

    def has_tensors(self, files: DraftFiles) -> bool:
        """True when the names of the tensors are those of this kind."""
        return drafts_blocks(files)

    def read_config(self, files: DraftFiles, target: TargetConfig | None = None) -> Config:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`; ``target`` gives the authors' layer ids to a
        config that names none, as the first heads' do."""
        return self.config_class(**self.read_fields(files, target))

    def read_fields(self, files: DraftFiles, target: TargetConfig | None) -> dict[str, Any]:
        """Fields of the architecture; arguments and errors as of :meth:`read_config`."""
        raw = files.config
        where = files.where
        layer = read_table(raw, "transformer_layer_config", where) or raw
        table = read_table(raw, TABLE, where)
        whole = self.read_keys(files)
        self.refuse_other_heads(whole, where)
        check_activation(layer, where)
        sizes = read_decoder(layer, where) | {"rotary_dim": partial_rotary_dim(layer, where)}
        stated = read_size(layer, LAYERS, where, count_layers(files), most=MAX_LAYERS)
        copied = (raw.get("num_target_layers"), None if target is None else target.num_layers)
        layers = num_layers(files, stated, copied)
        bias = read_flag(layer, "attention_bias", where)
        block = read_size(whole, "block_size", where, most=MAX_BLOCK)
        return {
            **sizes,
            "target_hidden_size": read_size(raw, "target_hidden_size", where, sizes["hidden_size"]),
            "draft_vocab_size": read_size(raw, "draft_vocab_size", where, sizes["vocab_size"]),
            "max_position_embeddings": read_size(
                layer, "max_position_embeddings", where, 2048, most=MAX_POSITIONS
            ),
            "aux_layer_ids": _layer_ids(whole, layers, where, target),
            "mask_token_id": _mask(whole, sizes["vocab_size"], where),
            "num_layers": layers,
            "block_size": block,
            "predicts_next": self.read_rows(whole, where),
            "attention_bias": bias,
            "attention_out_bias": bias,
            **_sliding(raw, table, layer, layers, block, where),
            **files.about,
        }

    def read_keys(self, files: DraftFiles) -> dict[str, Any]:
        """Keys of a config and of its :data:`TABLE` in one, with what rows predict under :data:`ROWS`. Raises
        UserError where both places say different things."""
        raw = files.config
        table = read_table(files.config, TABLE, files.where)
        stated = {key: value for key, value in raw.items() if value is not None or key not in table}
        for key in self.keys_of_both_places:
            if None not in (raw.get(key), table.get(key)) and raw[key] != table[key]:
                raise _contradiction(key, raw[key], f"{TABLE}.{key}", table[key], files.where)
        whole = {**table, **stated}

        # ModelOpt's word for the rows.
        shifted = whole.get(SHIFTED)
        if shifted is not None and whole.get(ROWS) not in (None, shifted):
            raise _contradiction(ROWS, whole[ROWS], SHIFTED, shifted, files.where)
        return whole if shifted is None else {**whole, ROWS: shifted}

    def write_config(self, config: Config) -> dict[str, Any]:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`."""
        slides = {
            "use_sliding_window": bool(config.sliding_layers),
            "sliding_window": config.sliding_window,
            LAYER_TYPES: [
                "full_attention" if window is None else "sliding_attention" for window in config.windows
            ],
        }
        own_rows = {"draft_vocab_size": config.draft_vocab_size} if config.owns_output else {}
        return {
            "architectures": [self.architecture],
            "model_type": "qwen3",
            LAYERS: config.num_layers,
            "target_hidden_size": config.target_hidden_size,
            **layer_to_dict(config, config.rms_norm_eps),
            "attention_bias": config.attention_bias,
            **own_rows,
            "block_size": config.block_size,
            ROWS: config.predicts_next,
            **slides,
            **({SLIDING_BOTH: config.sliding_both} if config.sliding_layers else {}),
            **self.own_keys(config),
        }

    def own_keys(self, config: Config) -> dict[str, Any]:
        """Keys of a ``config.json`` for the mask and the captured layers, by their outputs."""
        return {
            TABLE: {
                "mask_token_id": config.mask_token_id,
                FLAT_IDS: [layer - 1 for layer in config.aux_layer_ids],
                **({CAUSAL: False} if config.sliding_both else {}),  # vLLM reads that
            }
        }

    def part_keys(self, config: Config) -> dict[str, Any]:
        """Keys of a ``config.json`` for parts beside the body."""
        return {}

    def refuse_other_heads(self, config: dict[str, Any], where: str) -> None:
        """Raise UserError for a head that has more parts than ours of this kind."""
        unknown = (key for key in OTHER_HEADS if config.get(key) and key not in self.known_parts)
        for key in unknown:
            if (key, config[key]) != ("projector_type", self.name):
                raise UserError(
                    f"The draft in {where} has {key} {shown(config[key])}: a part that our {self.title} "
                    "does not have.",
                    "Serve it with the engine it was made for.",
                )

    def read_rows(self, config: dict[str, Any], where: str) -> bool:
        """Whether rows predict the next token; where ``config`` does not say it, what its authors' do."""
        return read_flag(config, ROWS, where)

    def sort_tensors(self, files: DraftFiles, config: Config, target: Target | None) -> HeadTensors:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`; an output layer over all of the target's tokens
        is a copy of the target's."""
        found = super().sort_tensors(files, config, target)
        tensors = found.tensors
        if not config.owns_output:
            for name in ("d2t", "t2d"):
                tensors.pop(name, None)
            if OUTPUT in tensors:
                found.copies[OUTPUT] = tensors.pop(OUTPUT)
            return found
        d2t, t2d = complete_map(tensors.pop("d2t", None), tensors.pop("t2d", None), config, files.where)
        fingerprint = files.own.get("vocab_map")
        if fingerprint is not None and fingerprint != map_fingerprint(d2t):
            raise UserError(
                f"The vocabulary map of the draft in {files.where} is not the one it was saved with.",
                "Use config.json and model.safetensors of one checkpoint.",
            )
        return found._replace(buffers={"d2t": d2t, "t2d": t2d})

    def write(self, head: Head, dtype: torch.dtype) -> DraftFiles:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`; with the map of an output layer of its own."""
        files = super().write(head, dtype)
        if not head.config.owns_output:
            return files
        files.config[OWN] |= {"vocab_map": map_fingerprint(head.d2t)}
        return DraftFiles(files.config, {**files.tensors, "d2t": head.d2t.cpu(), "t2d": head.t2d.cpu()})

    def check(self, files: DraftFiles, config: Config, target: TargetConfig) -> list[Finding]:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`; the captured layers and the rows' meaning
        too."""
        width = {"embedding size": (config.hidden_size, target.hidden_size)}
        return [
            *super().check(files, config, target),
            *findings.check_sizes(width),
            _check_layers(config, target),
            _check_rows(self.read_keys(files), config),
            *_check_count(files, config),
        ]

    def describe(self, config: Config, dtype: str) -> str:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`."""
        rows = "the token after it" if config.predicts_next else "its own token"
        window = ""
        if config.sliding_layers:
            window = f", {len(config.sliding_layers)} of them with a window of {config.sliding_window}"
            window += "" if config.sliding_both else ", causal within a block"
        return (
            f"{config.num_layers} decoder layers of hidden size {config.hidden_size} "
            f"({describe_attention(config)}){window}, in {dtype}. The inputs of target layers "
            f"{', '.join(map(str, config.aux_layer_ids))} are keys of every layer. It drafts blocks of "
            f"{config.block_size} rows in one pass, the sampled token and masks (token "
            f"{config.mask_token_id}); a row predicts {rows}."
        )

    def suggested_shape(self, config: Config) -> SpecShape:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`: the whole block."""
        return SpecShape(config.most_steps, 1, config.most_steps + 1)

    def conventions(self, head: Head, target: TargetConfig) -> list[Convention]:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`; what a row predicts too."""
        flipped = not head.config.predicts_next
        words = "rows that predict the next token" if flipped else "rows that predict their own token"
        remedy = f"Set {ROWS} to {str(flipped).lower()} in the draft's config.json."

        def change(head: Head) -> None:
            object.__setattr__(head.config, "predicts_next", flipped)

        rows = Convention("what rows predict", words, remedy, change)
        return [*super().conventions(head, target), rows]

    def token_conventions(self, head: Head, tokens: Iterable[int]) -> list[Convention]:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`: the anchor's own row is no mask."""
        depth = 1 + head.config.predicts_next

        def reads(token: int) -> Convention:
            def change(head: Head) -> None:
                object.__setattr__(head.config, "mask_token_id", token)

            remedy = f"Set mask_token_id to {token} in the draft's config.json."
            return Convention("mask token", f"token {token} as the mask", remedy, change, depth)

        own = head.config.mask_token_id
        most = head.config.vocab_size
        return [reads(token) for token in dict.fromkeys(tokens) if token != own and 0 <= token < most]

    def usual_layers(self, config: Config, target: TargetConfig) -> tuple[int, ...]:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`."""
        return published_layers(target.num_layers, config.num_layers)

    def layers_remedy(self, layers: tuple[int, ...]) -> str:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`."""
        return (
            f"Write {[layer - 1 for layer in layers]}, their outputs, as {FLAT_IDS} into the draft's "
            f"config.json ({list(layers)} as {NESTED_IDS} into one of speculators)."
        )

    def new_config(self, settings: Settings, target: TargetConfig) -> Config:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`; the mask's token is the last one by default."""
        if settings.start_from is not None:
            return self._start_from_config(settings.start_from, target)
        mask = target.vocab_size - 1 if settings.mask_token_id is None else settings.mask_token_id
        if mask >= target.vocab_size:
            raise UserError(
                f"head.mask_token_id is {mask}, but the target has {target.vocab_size} tokens.",
                "Name a token of the target that its texts do not have.",
            )
        ids = settings.aux_layer_ids
        if ids is None:
            ids = spread_layers(target.num_layers)
        if not all(0 <= layer <= target.num_layers for layer in ids):
            raise UserError(
                f"head.aux_layer_ids is {list(ids)}, but the target has layers 0 to {target.num_layers - 1}.",
                f"Name inputs of layers, for example {list(spread_layers(target.num_layers))}.",
            )
        layers = 5 if settings.num_layers is None else settings.num_layers
        fields: dict[str, Any] = {"mask_token_id": mask, "aux_layer_ids": ids, "num_layers": layers}
        fields |= {"block_size": settings.block_size, **self.chosen_parts(settings)}
        if settings.intermediate_size is not None:
            fields["intermediate_size"] = settings.intermediate_size
        if settings.draft_vocab_size is not None:
            check_vocab_size(settings.draft_vocab_size, target)
            fields["draft_vocab_size"] = settings.draft_vocab_size
        if settings.sliding_window is not None:
            fields |= {"sliding_window": settings.sliding_window, "sliding_layers": tuple(range(layers - 1))}
        return self.config_class.for_target(target, **fields)

    def chosen_parts(self, settings: Settings) -> dict[str, Any]:
        """Fields of the architecture that a training config asks for beside those of every block."""
        return {}

    def _start_from_config(self, folder: str, target: TargetConfig) -> Config:
        """The architecture of the head that ``start_from`` names. Raises UserError for one of another target
        or kind, and where it may read other layers than its config says."""
        files = open_draft(folder)
        kind = self.name if self.recognises(files) else files.architecture
        check_start_from(folder, [("kind", kind, self.name)])
        found = self.read_config(files, target)
        sizes = (
            ("target_hidden_size", found.target_hidden_size, target.hidden_size),
            ("vocab_size", found.vocab_size, target.vocab_size),
        )
        check_start_from(folder, sizes)
        layers = _check_layers(found, target)
        if layers.level != "ok":
            raise UserError(f"head.start_from, {folder}: {layers.cause}", layers.remedy)
        return found

    def new_head(self, settings: Settings, config: Config, start: InitContext) -> Head:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`; with a final norm that says nothing yet."""
        if settings.start_from is not None:
            old = self.read(open_draft(settings.start_from), start.target, device=start.device)
            old.config = config
            return old
        head = super().new_head(settings, config, start)
        if config.owns_output:
            init_output_layer(head, settings, start)
        scale_final_norm(head.norm, start.target)
        return head


def _mask(config: dict[str, Any], vocab_size: int, where: str) -> int:
    number = config.get("mask_token_id")
    if number is None:
        raise UserError(
            f"The draft of blocks in {where} does not say which token is its mask.",
            "Write mask_token_id into its config.json.",
        )
    if type(number) is not int or not 0 <= number < vocab_size:
        raise wrong_value("mask_token_id", number, where, f"a token below {vocab_size}")
    return number


def published_layers(target_layers: int, num_layers: int) -> tuple[int, ...]:
    """Inputs of the target's layers that a head of ``num_layers`` layers reads whose config names none: as
    many, spread by the rule of DFlash's authors over the outputs of layers 1 to L - 3."""
    if num_layers == 1:
        return (target_layers // 2 + 1,)
    span = target_layers - 4
    return tuple(round(1 + i * span / (num_layers - 1)) + 1 for i in range(num_layers))


def _contradiction(key: str, value: object, other: str, other_value: object, where: str) -> UserError:
    """Error for a fact that a config states twice and differently."""
    return UserError(
        f"The config.json in {where} says {key} {shown(value)} and {other} {shown(other_value)}.",
        "Keep the one that the head was trained with, and remove the other.",
    )


def _layer_ids(
    config: dict[str, Any], num_layers: int, where: str, target: TargetConfig | None
) -> tuple[int, ...]:
    """The captured layers by their inputs, whichever way they are stored."""
    flat = config.get(FLAT_IDS)
    nested = config.get(NESTED_IDS)
    ids: Any = flat if nested is None else nested
    shift = 1 if nested is None else 0
    if ids is None and target is not None:
        return published_layers(target.num_layers, num_layers)
    is_list = isinstance(ids, list) and 0 < len(ids) <= MAX_LAYERS
    if not is_list or not all(type(layer) is int and -shift <= layer <= MAX_LAYERS for layer in ids):
        raise UserError(
            f"The draft in {where} has the layer ids {shown(ids)}.",
            f"Make {FLAT_IDS} a list such as [1, 9, 17, 25, 33].",
        )
    return tuple(layer + shift for layer in ids)


def _sliding(
    config: dict[str, Any], table: dict[str, Any], layer: dict[str, Any], layers: int, block: int, where: str
) -> dict[str, Any]:
    """Fields of the layers with a sliding window: those that ``layer_types`` names, or all with ``use_swa``
    where it names none, as vLLM reads it."""
    kinds = layer.get(LAYER_TYPES)
    if kinds is None:
        kinds = ["full_attention"] * layers
    if isinstance(kinds, list) and layer.get(LAYERS) == len(kinds):  # of the target, where they are more
        kinds = kinds[:layers]
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in known for kind in kinds):
        raise wrong_value(LAYER_TYPES, kinds, where, f"{layers} of full_attention and sliding_attention")
    sliding = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    if read_flag(table, "use_swa", where):
        sliding = sliding or tuple(range(layers))
    causal = read_flag(table, CAUSAL, where) if table.get(CAUSAL) is not None else None
    if causal and len(sliding) < layers:
        raise UserError(
            f"The draft in {where} has layers of full attention that are causal in a block, as JetSpec's "
            f"({TABLE}.{CAUSAL}): ours are not.",
            "Serve it with the engine it was made for.",
        )
    if not sliding:
        return {}
    both = config.get(SLIDING_BOTH)
    if both is not None:
        both = read_flag(config, SLIDING_BOTH, where)
    elif causal is not None:
        both = not causal
    elif "speculators_model_type" in config:
        both = False
    elif NEMO in (config.get("architectures") or []):
        both = True
    else:
        raise UserError(
            f"The draft in {where} does not say whether layers with a sliding window are causal in a block.",
            f"Write {SLIDING_BOTH} into its config.json: false if they are.",
        )
    named = table if table.get(SWA_SIZE) is not None else layer
    key = SWA_SIZE if named is table else "sliding_window"
    window = read_size(named, key, where, most=MAX_POSITIONS)
    if window <= block:
        raise wrong_value(key, window, where, f"more than the block of {block}")
    return {"sliding_window": window, "sliding_layers": sliding, "sliding_both": both}


def _check_layers(config: DFlashConfig, target: TargetConfig) -> Finding:
    """Find ids out of range, and the usual ones in the other numbering, which fails silently."""
    ids = config.aux_layer_ids
    count = target.num_layers
    known = {spread_layers(count), published_layers(count, config.num_layers), published_layers(count, 5)}
    if not all(0 <= layer <= count for layer in ids):
        cause = f"the draft reads the inputs of layers {list(ids)}, the target has {count} layers."
        return Finding("error", "layer ids", cause, OWN_TARGET)
    for shift, meant in ((1, "inputs"), (-1, "outputs")):
        usual = tuple(layer - shift for layer in ids)
        if usual in known and ids not in known:
            cause = (
                f"the draft reads the inputs of layers {list(ids)}, one off the usual {list(usual)}: its ids "
                f"look like {meant} that are stored as the other."
            )
            remedy = f"If the accept length is about 1.0, shift the layer ids in its config.json by {-shift}."
            return Finding("warning", "layer ids", cause, remedy)
    return Finding("ok", "layer ids", f"inputs of layers {list(ids)} of {count}.")


def _check_count(files: DraftFiles, config: DFlashConfig) -> list[Finding]:
    """Report a number of layers that is not that of the tensors, as where it was copied from the target."""
    layer = read_table(files.config, "transformer_layer_config", files.where) or files.config
    stated = layer.get(LAYERS)
    if stated in (None, config.num_layers):
        return []
    cause = f"the config says {stated}, and the tensors are those of {config.num_layers}, which are taken."
    return [Finding("warning", "layers", cause, f"Correct {LAYERS} in its config.json.")]


def _check_rows(stated: dict[str, Any], config: DFlashConfig) -> Finding:
    """Report what a row predicts, and where that was only assumed; ``stated`` are the keys of its config."""
    what = "the token after it" if config.predicts_next else "its own token"
    if stated.get(ROWS) is not None:
        return Finding("ok", "rows of a block", f"a row predicts {what} ({ROWS}).")
    cause = f"the draft does not say {ROWS}, so that a row is taken to predict {what}."
    return Finding("warning", "rows of a block", cause, f"Add {ROWS} to its config.json.")
