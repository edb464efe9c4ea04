"""Contracts of a kind of draft, by which files, trainer, engine and cards treat all kinds alike.

A :class:`DraftKind` drafts, and may be a whole model. A :class:`HeadKind` reads a target's hidden states, and
is also trained, saved, exported and planned. ``docs/how-to/add-an-algorithm.md`` has the steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from eagle_kit.config.drafts.base import HeadConfig
from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import SpecShape
from eagle_kit.data.chat.vocab_map import VocabMap
from eagle_kit.drafts.base.conventions import Convention, shared_conventions
from eagle_kit.drafts.base.draft_model import DraftModel, HeadDraftModel
from eagle_kit.drafts.files import findings
from eagle_kit.drafts.files.copies import is_copy, warn_unless_copy
from eagle_kit.drafts.files.draft_files import EMBEDDING, OUTPUT, DraftFiles
from eagle_kit.drafts.files.findings import Finding, TargetFolder
from eagle_kit.drafts.files.formats import DraftFormat
from eagle_kit.models.config import DecoderConfig, HeadArchitecture, TargetConfig
from eagle_kit.models.draft_head import DraftHead
from eagle_kit.models.loading.fp8_layout import read_fp8_layout
from eagle_kit.models.loading.loader import check_tensors, fill, in_dtype, stays_exact
from eagle_kit.models.loading.published import (
    Part,
    dequantised,
    expected_shapes,
    published_parts,
)
from eagle_kit.models.targets.target import Target
from eagle_kit.ops.linear import pack_weights

FIRST_NORM = 0.1
"""Largest factor of :func:`scale_final_norm`."""
FIRST_LOGITS = 0.35
"""Largest standard deviation of a new head's logits. A tenth of SmolLM2's final norm gives about this."""
Config = TypeVar("Config", bound=HeadArchitecture)
Head = TypeVar("Head", bound=DraftHead)
Settings = TypeVar("Settings", bound=HeadConfig)


class DraftKind(ABC):
    """Anything that drafts, seen as files and as a model that serves.

    Attributes:
        name: of the kind, lower case, for example ``eagle3``.
        algorithms: values of ``--speculative-algorithm`` that accept it, its own name first.
        is_whole_model: it reads no hidden states of a target.
        is_in_target: a target's own folder may hold it.
    """

    name: ClassVar[str]
    algorithms: ClassVar[tuple[str, ...]]
    is_whole_model: ClassVar[bool] = False
    is_in_target: ClassVar[bool] = False

    @property
    def algorithm(self) -> str:
        """Its name when serving."""
        return self.algorithms[0]

    @abstractmethod
    def recognises(self, files: DraftFiles) -> bool:
        """True when ``files`` are of this kind, by config and names of tensors."""

    @abstractmethod
    def validate(self, files: DraftFiles, target: TargetFolder) -> list[Finding]:
        """Check a draft against a target. Raises UserError when its config cannot be read."""

    @abstractmethod
    def draft_model(
        self, files: DraftFiles, target: Target, token_map: torch.Tensor | None = None
    ) -> DraftModel:
        """Load a draft for serving, in the target's dtype and on its device.

        Args:
            token_map: target ids int64 ``[Vd]`` that it may propose; all, or those of its own map, when None.

        Raises:
            UserError: missing, unexpected or misshapen tensors by name, or another target's draft.
        """


class HeadTensors(NamedTuple):
    """All tensors of a head's files, sorted by their use.

    Attributes:
        config: the architecture, with what only tensors show (``own_embedding``).
        tensors: parameters of the head, by published name, in the dtypes of the file.
        copies: copies of the target's embedding and output layer, which are not used.
        buffers: buffers of the head, such as ``d2t`` and ``t2d``, by name in our module.
        borrows_output: the output layer is the target's, though the kind has one.
        ties_output: the output layer is the embedding, which is the head's own or the target's.
    """

    config: Any
    tensors: dict[str, torch.Tensor]
    copies: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    borrows_output: bool = False
    ties_output: bool = False


class InitContext(NamedTuple):
    """What the first weights of a head are made from.

    Attributes:
        target: the target model.
        folder: its folder.
        vocab: draft vocabulary that was chosen from the training data.
        device: device of the new head.
    """

    target: Target
    folder: Path
    vocab: VocabMap
    device: torch.device


class HeadKind(DraftKind, Generic[Config, Head, Settings]):
    """A draft head: how it is published, checked, described, planned, trained and served.

    A new kind sets six attributes: ``name``, ``title``, ``algorithms``, ``trained_as``, ``config_class`` and
    ``head_class``. It writes five methods: :meth:`recognises`, :meth:`read_config`, :meth:`write_config`,
    :meth:`describe` and :meth:`new_config`. All other members have defaults.

    Attributes:
        title: name of such a head in cards and messages, for example ``EAGLE-3 draft head``.
        trained_as: values of ``head.kind`` in training configs that train it.
        config_class: of its architecture, a dataclass. No two kinds have the same one.
        head_class: of its module, made from a ``config_class`` alone.
        vllm_method: its name in vLLM's ``--speculative-config``; None where vLLM has no such heads.
        vllm_options: further entries of that option.
        needs_layers: its first weights are read from the target's layers.
        may_own_embedding: the architecture has a field ``own_embedding``, true for an embedding of its own.
        format_class: converts its files to and from the layouts of other projects.
    """

    config_class: type[Config]
    head_class: type[Head]
    title: ClassVar[str]
    trained_as: ClassVar[tuple[str, ...]]
    vllm_method: ClassVar[str | None] = None
    vllm_options: ClassVar[Mapping[str, Any]] = {}
    needs_layers: ClassVar[bool] = False
    may_own_embedding: ClassVar[bool] = False
    format_class: ClassVar[type[DraftFormat]] = DraftFormat

    # Every kind writes these, and `recognises`.

    @abstractmethod
    def read_config(self, files: DraftFiles, target: TargetConfig | None = None) -> Config:
        """Read the architecture, of ours or of another trainer.

        Args:
            target: completes what old configs leave out.

        Raises:
            UserError: a part that our head does not have, or a key that is missing or impossible.
        """

    @abstractmethod
    def write_config(self, config: Config) -> dict[str, Any]:
        """Make the ``config.json`` of a head."""

    @abstractmethod
    def describe(self, config: Config, dtype: str) -> str:
        """Say in a sentence or two what the head is, for its card; ``dtype`` of its weights, in words."""

    @abstractmethod
    def new_config(self, settings: Settings, target: TargetConfig) -> Config:
        """The architecture that a training config asks for. Raises UserError when the target has no use for
        it."""

    # Replaced where files have more than the head's parameters under other names: a prefix of layers, a
    # vocabulary map, matrices of the target.

    def published_name(self, part: str) -> str:
        """Published name of a tensor, from its name in our module (:func:`published_parts`)."""
        return part

    def names(self, files: DraftFiles) -> dict[str, str]:
        """Name the tensors of the head: published name -> name in ``files``.

        Raises:
            UserError: one tensor under two names.
        """
        return our_names(((name.removeprefix("model."), name) for name in files.tensors), files.where)

    def sort_tensors(self, files: DraftFiles, config: Config, target: Target | None) -> HeadTensors:
        """Sort the tensors of ``files``, without checking the shapes of parameters.

        Args:
            target: distinguishes a copy of its matrices from a matrix of the head.
        """
        tensors: dict[str, torch.Tensor] = {}
        for published, stored in self.names(files).items():
            tensors[published] = files.tensors[stored]
        copies: dict[str, torch.Tensor] = {}
        if EMBEDDING in tensors:
            copies[EMBEDDING] = tensors.pop(EMBEDDING)
        return HeadTensors(config, tensors, copies, {})

    def write(self, head: Head, dtype: torch.dtype) -> DraftFiles:
        """Publish a head: tensors on the CPU in ``dtype``, but for biases of gates; nothing of the target."""
        parts = self.parts(head, ())
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in head.named_parameters():
            group = parts[name]
            stored_dtype = parameter.dtype if stays_exact(head, name) else dtype
            value = parameter.detach().to("cpu", stored_dtype).reshape(-1, *group[0].shape[1:])
            pieces = value.split([part.shape[0] for part in group])
            for part, piece in zip(group, pieces, strict=True):
                tensors[part.name] = piece.clone()
        return DraftFiles(self.write_config(head.config), tensors)

    # Replaced where sizes or the usual shape differ.

    def check(self, files: DraftFiles, config: Config, target: TargetConfig) -> list[Finding]:
        """Compare sizes with the target's."""
        pairs = {
            "hidden size": (config.target_hidden_size, target.hidden_size),
            "vocabulary": (config.vocab_size, target.vocab_size),
        }
        return findings.check_sizes(pairs)

    def suggested_shape(self, config: Config) -> SpecShape:
        """The shape in the commands of its card."""
        return SpecShape(5, 4, 16)

    # Replaced where first weights are not those of the module, or a layer saves other states.

    def new_head(self, settings: Settings, config: Config, start: InitContext) -> Head:
        """A head with first weights, in fp32 and bound to the target. Raises UserError when they cannot be
        had."""
        head = self.head_class(config).to(device=start.device, dtype=torch.float32)
        return head.bind(start.target.lm_head)

    def saved_activation_bytes(self, config: Config, width: int, *, is_gpu: bool) -> tuple[float, float]:
        """Bytes of activations that one row of the decoder layer saves for backward, divided by H.

        What attention and MLP save themselves is not counted.

        Args:
            width: bytes of a matmul's operand: 4 for fp32, 2 for half precision.
            is_gpu: the norms are kernels, whose results have the operand's dtype.

        Returns:
            The bytes before attention, and the bytes after it.
        """
        return 4 * width, 2 * width

    # Replaced where `diagnose` can try other readings of the weights.

    def joint_layers(self, head: Head) -> list[str]:
        """Names of the linear layers that read embedding and feature side by side."""
        return []

    def conventions(self, head: Head, target: TargetConfig) -> list[Convention]:
        """Other readings of its weights that load as well and cost acceptance."""
        return shared_conventions(head, target, self.joint_layers(head))

    def token_conventions(self, head: Head, tokens: Iterable[int]) -> list[Convention]:
        """Readings by which one of the target's ``tokens`` that texts do not have is the head's mask."""
        return []

    def usual_layers(self, config: Config, target: TargetConfig) -> tuple[int, ...]:
        """Inputs of the target's layers that such heads read as a rule."""
        return target.default_aux_layer_ids

    def layers_remedy(self, layers: tuple[int, ...]) -> str:
        """What to do where the inputs of ``layers`` are those that a head was trained on, a sentence."""
        return (
            f'Write {list(layers)} as eagle_aux_hidden_state_layer_ids with the convention "input" into the '
            "draft's config.json."
        )

    # Shared by all kinds.

    @cached_property
    def format(self) -> DraftFormat:
        """Conversion of its files to and from the layouts of other projects, by :attr:`format_class`."""
        return self.format_class(self)

    def weights(self, files: DraftFiles, config: Config, target: Target | None = None) -> HeadTensors:
        """Read every tensor and account for it.

        Raises:
            UserError: a corrupt file; missing, unexpected or misshapen tensors by name; an impossible map.
        """
        found = self.with_own_embedding(self.sort_tensors(files, config, target), target)

        # Shapes that the architecture asks for, by published names.
        with torch.device("meta"):
            head = self.head_class(found.config)
        parts = (part for group in self.parts(head, found.tensors).values() for part in group)
        expected = expected_shapes(parts, found.tensors, read_fp8_layout(files.config, files.where))
        if found.borrows_output or found.ties_output:
            del expected[OUTPUT]

        # A copy of the target's embedding is checked as well.
        tensors = dict(found.tensors)
        if EMBEDDING in found.copies:
            expected[EMBEDDING] = (config.vocab_size, config.hidden_size)
            tensors[EMBEDDING] = found.copies[EMBEDDING]
        check_tensors(tensors, expected, files.where)
        return found

    def with_own_embedding(self, found: HeadTensors, target: Target | None) -> HeadTensors:
        """Move the embedding from the copies to the head's tensors, where it is the head's own.

        It is its own if the architecture says so, or if its values differ from the target's.
        """
        brought = found.copies.get(EMBEDDING)
        if brought is None or not self.may_own_embedding:
            return found

        is_own = found.config.own_embedding
        if not is_own and target is not None:
            is_own = not is_copy(brought, target.embed_tokens.weight)
        if not is_own:
            return found

        copies = dict(found.copies)
        del copies[EMBEDDING]
        return found._replace(
            config=replace(found.config, own_embedding=True),
            tensors={**found.tensors, EMBEDDING: brought},
            copies=copies,
        )

    def parts(self, head: DraftHead, names: Iterable[str]) -> dict[str, list[Part]]:
        """List the published tensors that are stacked into each parameter of ``head``.

        Args:
            names: tensors of the checkpoint.
        """
        found: dict[str, list[Part]] = {}
        for name, group in published_parts(head.named_parameters(), head.config.layer, names).items():
            found[name] = [Part(self.published_name(part.name), part.shape) for part in group]
        return found

    def read(
        self,
        files: DraftFiles,
        target: Target | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Head:
        """Load a head, ready to be trained. Warns about a copy of another target's matrix.

        Args:
            target: the head is bound to it; needed by heads that name no layers or bring no output layer.
            dtype: of the weights in memory; RoPE and biases of gates stay fp32.

        Raises:
            UserError: as :meth:`read_config` and :meth:`weights`; sizes that are not the target's.
        """
        config = self.read_config(files, None if target is None else target.config)
        found = self.weights(files, config, target)
        # Tensors of a file are unaligned, where matmuls add up in another order than a run's own did.
        tensors = {name: tensor.clone() for name, tensor in found.tensors.items()}

        # The target must fit. Its matrices may stand in for those that the files lack.
        if target is not None:
            findings.check_fit(config, target.config)
            warn_unless_copy(EMBEDDING, found.copies.get(EMBEDDING), target.embed_tokens.weight, files.where)
            warn_unless_copy(OUTPUT, found.copies.get(OUTPUT), target.head_weight, files.where)
        if found.borrows_output:
            tensors[OUTPUT] = _borrowed_output(config, target, files.where)
        if found.ties_output:
            tensors[OUTPUT] = _tied_output(config, tensors.get(EMBEDDING), target, files.where)

        # Parameters, then buffers, which the meta device did not make.
        with torch.device("meta"):
            head = self.head_class(found.config)
        layout = read_fp8_layout(files.config, files.where)
        fill(head, self.parts(head, tensors), tensors, layout, dtype, device)
        head.make_buffers()
        for name, buffer in found.buffers.items():
            head.get_buffer(name).copy_(buffer)
        head.to(device)
        return head if target is None else head.bind(target.lm_head)

    def validate(self, files: DraftFiles, target: TargetFolder) -> list[Finding]:
        """See :class:`DraftKind`."""
        config = self.read_config(files, target.config)
        return [
            *self.check(files, config, target.config),
            findings.check_context(config.max_position_embeddings, target.config),
            findings.check_rope(config.layer, target.config),
            findings.check_template(config, target),
            findings.check_target(config, files.metadata, target),
            self._check_weights(files, config),
        ]

    def _check_weights(self, files: DraftFiles, config: Config) -> Finding:
        try:
            found = self.weights(files, config)
            layout = read_fp8_layout(files.config, files.where)
            findings.check_values(dequantised(found.tensors, layout))
        except UserError as error:
            return Finding("error", "weights", error.cause, error.remedy)
        brought = ""
        if found.copies:
            used = "the target's are used"
            if self.may_own_embedding and EMBEDDING in found.copies:
                used = f"{EMBEDDING} is used where it is not the target's"
            brought = f" It brings {' and '.join(found.copies)}; {used}."
        ok = f"every tensor is there, is finite and has the shape and scale of a head's.{brought}"
        return Finding("ok", "weights", ok)

    def runs_target(self, config: TrainConfig) -> bool:
        """True if training needs the target's layers. It does not if the hidden states come from a store and
        the run has no validation (``validation.every`` is 0)."""
        return config.data.store is None or config.validation.every > 0 or self.needs_layers

    def draft_model(
        self, files: DraftFiles, target: Target, token_map: torch.Tensor | None = None
    ) -> HeadDraftModel:
        """See :class:`DraftKind`."""
        weight = target.embed_tokens.weight
        head = self.read(files, target, dtype=weight.dtype, device=weight.device)
        return head_draft_model(head, target, token_map)


def head_draft_model(
    head: DraftHead, target: Target, token_map: torch.Tensor | None = None
) -> HeadDraftModel:
    """Make a head of any kind ready to draft for ``target``; it is changed. Raises UserError for one that
    does not fit."""
    findings.check_fit(head.config, target.config)
    weight = target.embed_tokens.weight
    head = in_dtype(head.to(device=weight.device), weight.dtype).eval().requires_grad_(False)
    pack_weights(head)
    return HeadDraftModel(head, target, token_map)


def our_names(pairs: Iterable[tuple[str, str]], where: str) -> dict[str, str]:
    """Published names and those in the file as a table. Raises UserError for one tensor under two names."""
    names: dict[str, str] = {}
    for ours, theirs in pairs:
        if ours in names:
            raise UserError(f"The draft in {where} has {ours} twice.", "Use a complete checkpoint.")
        names[ours] = theirs
    return names


def _borrowed_output(config: HeadArchitecture, target: Target | None, where: str) -> torch.Tensor:
    """A copy of the target's output layer."""
    if target is None:
        raise UserError(
            f"The draft in {where} has no lm_head because it shares its target's.",
            "Load it together with its target.",
        )
    weight = target.head_weight.detach()
    shape = (config.draft_vocab_size, config.hidden_size)
    check_tensors({OUTPUT: weight}, {OUTPUT: shape}, "the target")
    return weight.clone()


def _tied_output(
    config: HeadArchitecture, own: torch.Tensor | None, target: Target | None, where: str
) -> torch.Tensor:
    """A copy of the head's ``own`` embedding, or of the target's."""
    if own is None and target is None:
        raise UserError(
            f"The draft in {where} has its target's embedding for its output layer (tie_word_embeddings).",
            "Load it together with its target.",
        )
    weight = target.embed_tokens.weight.detach() if own is None and target is not None else own
    assert weight is not None
    check_tensors({OUTPUT: weight}, {OUTPUT: (config.draft_vocab_size, config.hidden_size)}, where)
    return weight.clone()


def describe_attention(layer: DecoderConfig) -> str:
    """Sizes of a layer's attention, for a card."""
    if layer.mla is not None:
        rope = layer.mla.qk_rope_head_dim
        return f"{layer.num_heads} heads over latents of {layer.mla.kv_lora_rank} + {rope} values"
    return f"{layer.num_heads} query and {layer.num_kv_heads} key-value heads of {layer.head_dim}"


@torch.no_grad()
def scale_final_norm(norm: nn.Module, target: Target) -> None:
    """Set the final norm of a new head to the target's times a small factor, in place.

    With factor 1 an untrained layer has large random logits, and the first loss is 15 where uniform logits
    give 9. The scale of norms differs by target (Gemma's has a root mean square of 54), so the factor depends
    on the standard deviation of the logits of random states.
    """
    full = target.norm_weight.float() * target.logit_form.scale

    # Standard deviation of the logits, over tokens, of states with independent values of variance 1.
    rows = target.head_weight
    squares = torch.linalg.vector_norm(rows, dim=0, dtype=torch.float32).square() / len(rows)
    deviation = float((full.square() * squares.to(full.device)).sum().sqrt())

    share = min(FIRST_NORM, FIRST_LOGITS / max(deviation, 1e-6))
    norm.weight.copy_(full * share)  # type: ignore[operator]
