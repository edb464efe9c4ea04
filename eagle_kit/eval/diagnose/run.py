"""``diagnose``: replay prompts, measure, try every hypothesis, and name the causes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from eagle_kit.config.diagnose import DiagnoseConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import SpecShape
from eagle_kit.data.chat.template import has_chat_template, template_hash
from eagle_kit.drafts.files.draft import AnyDraft, DraftFolder
from eagle_kit.drafts.files.findings import Finding
from eagle_kit.drafts.files.validate import validate_draft
from eagle_kit.eval.diagnose.causes import Cause, Measured, causes_in_files, name_causes
from eagle_kit.eval.diagnose.chain import ChainResult, Source, draft_chains
from eagle_kit.eval.diagnose.compare import Comparison, compare_server, gap
from eagle_kit.eval.diagnose.context import FAR, FEWEST, measure_context
from eagle_kit.eval.diagnose.fit import measure_fit
from eagle_kit.eval.diagnose.formats import FormatResult, measure_formats
from eagle_kit.eval.diagnose.hypotheses import DTYPE, ROPE, Hypothesis, hypotheses, layers_needed, mask_tokens
from eagle_kit.eval.diagnose.models import Models, load_models
from eagle_kit.eval.diagnose.replay import (
    DRAFTED,
    PLAIN,
    Replay,
    Responses,
    check_sizes,
    decode_drafted,
    decode_responses,
)
from eagle_kit.eval.diagnose.row import compute_states, pack
from eagle_kit.eval.diagnose.server import ServerClient, ServerResult
from eagle_kit.eval.diagnose.trials import (
    LIKELY,
    STEPS,
    Trial,
    compare,
    run_hypothesis,
    run_trials,
    simulate_decoding,
)
from eagle_kit.models.loading.loader import read_target_config
from eagle_kit.models.loading.source import resolve_target
from eagle_kit.report.stages import Stages

FAULTS = "undoing faults"
SERVER = "the server"
FAULTS_COST = 2.0
"""Time of undoing faults, in times that of decoding the responses plainly."""
ENGINE_MARGIN = 0.02
"""Share by which the engine's tokens per verify may differ from the head's own chain, for ties of two
logits."""


@dataclass(frozen=True)
class Diagnosis:
    """Causes of low acceptance, and the measurements that they follow from.

    Attributes:
        causes: the likeliest first; empty for a head that fits.
        findings: of the check of the files.
        dtype: of the weights in use; empty where none were loaded.
        measured: everything that speaks for or against a cause; None where the files alone decide.
        replay: the responses of our engine with the draft; None where the files alone decide.
        server: a running server on the same prompts.
        failure: what ended the comparison with the server; everything else was measured.
    """

    causes: tuple[Cause, ...]
    findings: tuple[Finding, ...]
    dtype: str = ""
    measured: Measured | None = None
    replay: Replay | None = None
    server: Comparison | None = None
    failure: UserError | KeyboardInterrupt | None = None

    @property
    def is_healthy(self) -> bool:
        """True when no fault was found."""
        return not any(cause.is_found for cause in self.causes)


def diagnose(
    draft: AnyDraft,
    target: str | Path,
    config: DiagnoseConfig,
    *,
    server: ServerClient | None = None,
    is_quiet: bool = False,
) -> Diagnosis:
    """Find out why few tokens of a draft head are accepted.

    Args:
        draft: see :meth:`~eagle_kit.drafts.files.draft.DraftFolder.open`.
        server: gets the same prompts. It is tried before anything is loaded.
        is_quiet: draw no progress bars.

    Raises:
        UserError: a model that cannot be found, a draft that is no head, too short responses, a server that
            does not answer, or one beside a target without a chat template.
    """
    # The files. An error in them ends the diagnosis.
    check_sizes(config)
    folder = resolve_target(target)
    opened = DraftFolder.open(draft, read_target_config(folder))
    _ = opened.head_kind  # a whole model is refused
    findings = tuple(validate_draft(opened, folder, config.engine.chat_template))
    errors = causes_in_files(findings)
    if errors:
        return Diagnosis(tuple(errors), findings)

    # The models.
    if server is not None:
        server.probe()
    models = load_models(opened, folder, config.engine)
    return diagnose_models(models, findings, config, server=server, is_quiet=is_quiet)


def diagnose_models(
    models: Models,
    findings: Sequence[Finding],
    config: DiagnoseConfig,
    *,
    server: ServerClient | None = None,
    is_quiet: bool = False,
) -> Diagnosis:
    """Diagnose models that are loaded, and whose files were checked; see :func:`diagnose`."""
    if server is not None and not has_chat_template(models.llm.tokenizer):
        raise UserError(
            "The target has no chat template, and a server is asked with chats.",
            "Leave --base-url out, or give --chat-template FILE.",
        )

    # Announce the stages.
    dtype = str(models.dtype).removeprefix("torch.")
    shape = _chain(models)
    costs: dict[str, float] = {
        PLAIN: config.limit,
        f"{DRAFTED} {shape}": config.limit,
        FAULTS: FAULTS_COST * config.limit,
    }
    if server is not None:
        costs[SERVER] = config.limit
    stages = Stages(costs, sample=config.engine.batch_size, shows_bar=not is_quiet)
    try:
        # Responses of the target, and the draft's over them.
        responses = decode_responses(models.llm, config, stages)
        if not responses.is_finite:
            return Diagnosis((_nan_in_target(dtype),), tuple(findings), dtype)
        basis = make_basis(models, responses)
        replay = decode_drafted(models.llm, responses, config, shape, stages)
        replay = replace(replay, predicted=simulate_decoding(basis.served, basis.source.row))

        # Try the hypotheses.
        measured = measure(models, responses, basis, findings, config, stages)
        causes = [*_engine_fault(models, replay), *name_causes(measured)]

        # Compare with a server; a failure of it does not lose what was found here.
        compared: Comparison | None = None
        failure: UserError | KeyboardInterrupt | None = None
        try:
            if server is not None:
                stages.start(SERVER, len(responses.messages), "response")
                seen = server.replay(responses.messages, config.max_tokens, stages.step)
                compared = _compare_with_server(models, responses, config, seen, basis, replay, stages)
        except (UserError, KeyboardInterrupt) as error:
            failure = error
        if compared is not None and compared.cause is not None:
            causes.append(compared.cause)

        # Causes that were found come before possible ones, and the costliest first.
        causes.sort(key=lambda cause: (not cause.is_found, -cause.cost))
        found = Diagnosis(tuple(causes), tuple(findings), dtype, measured, replay)
        return replace(found, server=compared, failure=failure)
    finally:
        stages.close()


def _nan_in_target(dtype: str) -> Cause:
    return Cause(
        "NaN",
        f"The target's own logits are not finite in {dtype}, without any draft.",
        "Decode in bfloat16 or float32, and check the target's weights.",
    )


class Basis(NamedTuple):
    """What every measurement starts from.

    Attributes:
        hypotheses: all that can be tried.
        source: the responses with the target's states.
        served: the head's chains over them, as it is served.
    """

    hypotheses: list[Hypothesis]
    source: Source
    served: ChainResult


def make_basis(models: Models, responses: Responses) -> Basis:
    """Run the target over the responses once, with every layer captured that a hypothesis needs."""
    masks = mask_tokens(models.llm.tokenizer, models.target.config.vocab_size)
    tried = hypotheses(models.head, models.target.config, models.embedding, masks)
    row = pack(responses.texts).to(models.target.embed_tokens.weight.device)
    layers = layers_needed(tried, models.head, models.target.config)
    source = Source(models.target, row, compute_states(models.target, row, sorted(layers)))
    return Basis(tried, source, draft_chains(models.head, source, STEPS))


def _chain(models: Models, steps: int = STEPS) -> SpecShape:
    """A chain of ``steps``, or as many as the head drafts."""
    steps = min(steps, models.head.most_steps or steps)
    return SpecShape(steps, 1, steps + 1)


def measure(
    models: Models,
    responses: Responses,
    basis: Basis,
    findings: Sequence[Finding],
    config: DiagnoseConfig,
    stages: Stages,
) -> Measured:
    """Take the figures, try the hypotheses, and measure long texts and other formats."""
    # Every hypothesis, and fp32.
    stages.start(FAULTS, len(basis.hypotheses) + 3, "trial")
    trials = run_trials(models.head, basis.source, basis.hypotheses, stages.step)
    trials += _in_float32(models, basis)
    stages.step()

    # Long texts.
    length = min(config.context, models.target.config.max_position_embeddings)
    context = None
    skipped = ""
    if length:
        ropes = [each for each in basis.hypotheses if each.subject == ROPE]
        context = measure_context(models.head, models.target, responses.texts, length, ropes)
    if length and context is None:
        skipped = (
            f"Acceptance by position was left out: texts of {length} tokens have fewer than {FEWEST} tokens "
            f"of responses behind {max(FAR, length // 2)}; give a larger --context."
        )
    stages.step()

    # Other chat formats.
    formats = _formats(models, responses, findings)
    stages.step()
    return Measured(
        measure_fit(models.head, basis.source, basis.served),
        trials,
        findings,
        context,
        formats,
        skipped=skipped,
        is_other_template=_is_other_template(models),
        other_copies=models.other_copies,
        training=models.training,
    )


def _is_other_template(models: Models) -> bool:
    """True if the draft names the template of its training, and it is not the target's."""
    trained = models.head.config.template_hash
    return bool(trained) and trained != template_hash(models.llm.tokenizer)


def _in_float32(models: Models, basis: Basis) -> list[Trial]:
    """The same responses with target and head in fp32."""
    exact_models = models.in_float32()
    if exact_models is None:
        return []
    target, head = exact_models
    row = basis.source.row
    source = Source(target, row, compute_states(target, row, head.capture))
    exact = draft_chains(head, source, STEPS)
    words = "target and head in float32"
    remedy = "Serve in the dtype of the draft's training, or keep target and head in bfloat16 or float32."
    trial = compare(Hypothesis(DTYPE, words, remedy), basis.served, exact, row.text_index)
    return [replace(trial, fit=measure_fit(head, source, exact))]


def _formats(models: Models, responses: Responses, findings: Sequence[Finding]) -> list[FormatResult]:
    """Other chat formats, unless the target's template is known to be that of training."""
    is_known = any(each.subject == "chat template" and each.level == "ok" for each in findings)
    if is_known or not has_chat_template(models.llm.tokenizer):
        return []
    return measure_formats(models.head, models.target, models.llm.renderer, responses)


def _engine_fault(models: Models, replay: Replay) -> list[Cause]:
    """Responses that plain decoding would not have given, or drafts that are not the head's, where both must
    be the same to the bit: in fp32 on a CPU."""
    is_exact = models.dtype == torch.float32 and models.target.embed_tokens.weight.device.type == "cpu"
    if not is_exact or not replay.stats.num_verifies or replay.predicted is None:
        return []
    remedy = "Report it with this command: it is a fault of eagle-kit, not of the draft."
    if replay.num_different:
        evidence = (
            f"{replay.num_different} greedy responses with speculation are not those of plain decoding."
        )
        return [Cause("our engine", evidence, remedy, cost=1.0)]
    engine = replay.stats.accept_length
    head = replay.predicted.accept_length
    if abs(engine - head) > ENGINE_MARGIN * head:
        evidence = f"The engine emits {engine:.3f} tokens per verify, and the head's own chain {head:.3f}."
        return [Cause("our engine", evidence, remedy, cost=1.0)]
    return []


def _compare_with_server(
    models: Models,
    responses: Responses,
    config: DiagnoseConfig,
    seen: ServerResult,
    basis: Basis,
    replay: Replay,
    stages: Stages,
) -> Comparison:
    """Our engine in the server's shape, where one is given or the server names it, beside the
    server."""
    # The server's shape.
    shape = seen.shape
    if config.engine.shape is not None:
        shape = config.engine.shape.at(1)
    elif shape is not None and shape.topk == 1:
        shape = _chain(models, shape.steps)
    if shape is None:
        return compare_server(seen, None, responses.outputs)

    # Our engine in this shape.
    ours = replay
    if shape != replay.shape:
        ours = decode_drafted(models.llm, responses, config, shape, stages)
    if shape.topk > 1:  # hypotheses are tried with chains only
        return compare_server(seen, ours, responses.outputs)
    likeness = partial(likely_misreading, models, basis, seen, shape)
    return compare_server(seen, ours, responses.outputs, likeness)


def likely_misreading(models: Models, basis: Basis, seen: ServerResult, shape: SpecShape) -> str:
    """The hypothesis under which the head accepts what the server does, but for chance, as words
    with its tokens per verify; the nearest of several, and empty where there is none."""
    assert seen.accept_length is not None
    candidates = []
    for hypothesis in basis.hypotheses:
        result = run_hypothesis(models.head, basis.source, hypothesis, shape.steps)
        stats = simulate_decoding(result, basis.source.row)
        if not gap(seen, stats, LIKELY):
            distance = abs(stats.accept_length - seen.accept_length)
            candidates.append((distance, f"{hypothesis.words} ({stats.accept_length:.2f})"))
    if not candidates:
        return ""
    _, nearest = min(candidates)
    return nearest
