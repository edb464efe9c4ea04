"""Pilots of ``make-draft``: the work that is measured first, chosen by costs that are known in advance.

The arithmetic of target and head, divided by the rate of a matmul on this machine, gives the seconds of a
response and of a training step. A pilot is chosen by them, so that measuring takes at most a fixed share of
the budget.
"""

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import read_object
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.loading.loader import read_target_config
from eagle_kit.models.loading.source import resolve_target
from eagle_kit.train.plan.budget import LEAST_STEPS, RESERVED, RESPONSES, ROW_TOKENS, Pilot
from eagle_kit.train.plan.budget_configs import DraftJob, pilot_config
from eagle_kit.train.plan.costs import ProcessLayout, Rates, RunCosts, make_workload
from eagle_kit.train.plan.estimate import EXPECTED_EFFICIENCY, measure_matmul_rate
from eagle_kit.train.plan.sizes import num_weights
from eagle_kit.train.run.metrics import JsonLines
from eagle_kit.train.run.new_head import head_architecture

SHARE = 0.1
"""Maximum share of a budget for measuring."""
START_S = 15.0
"""Expected seconds from the start of a command until it loads a target."""
DECODING_EFFICIENCY = 0.2
"""Share of the matmul rate that decoding a batch of responses is expected to reach."""
READ_BYTES_PER_S = 2e8
"""Rate at which weights are expected to be read."""
SUPERVISED = 0.75
"""Expected share of supervised tokens."""
LEAST_ROWS = 2
"""Packed sequences of an optimiser step in the shortest training that is planned."""
PILOTS = (
    Pilot(responses=16, steps=8, rows=2, row_tokens=ROW_TOKENS),
    Pilot(responses=8, steps=4, rows=2, row_tokens=ROW_TOKENS // 2),
    Pilot(responses=4, steps=4, rows=1, row_tokens=ROW_TOKENS // 2),
    Pilot(responses=4, steps=3, rows=1, row_tokens=ROW_TOKENS // 4),
    Pilot(responses=2, steps=3, rows=1, row_tokens=ROW_TOKENS // 8),
)
"""Pilots, from the most exact to the shortest."""


@dataclass(frozen=True)
class ExpectedCosts:
    """Expected seconds on this machine.

    Attributes:
        loading: seconds of a stage until the target is loaded.
        response_token: seconds of a token of a response or of its prompt, in a batch.
        row_token: seconds of a token of a packed sequence in training.
        step_flops: floating-point operations of an optimiser step of the shortest training.
        flops_per_s: measured rate of a matmul.
    """

    loading: float
    response_token: float
    row_token: float
    step_flops: float
    flops_per_s: float

    def seconds(self, pilot: Pilot, tokens_per_response: int, processes: int) -> float:
        """Expected seconds of a pilot.

        Args:
            tokens_per_response: maximum number of tokens of a response and its prompt.
            processes: processes of the training, which share the rows of a step.
        """
        responses = pilot.responses * tokens_per_response * self.response_token
        rows_of_one = max(pilot.rows / processes, 1.0)
        training = pilot.steps * rows_of_one * pilot.row_tokens * self.row_token
        return 2 * self.loading + responses + training

    def least_budget(self, tokens_per_response: int, processes: int) -> float:
        """Shortest budget in seconds that can be planned.

        The shortest pilot takes :data:`SHARE` of it, and the training has time for the fewest steps that are
        planned.
        """
        pilot = self.seconds(PILOTS[-1], tokens_per_response, processes) / SHARE
        rows_of_one = max(LEAST_ROWS / processes, 1.0)
        steps = LEAST_STEPS * rows_of_one * ROW_TOKENS * self.row_token
        training = steps / ((1 - RESERVED - SHARE) * (1 - RESPONSES))
        return max(pilot, training)


def pilot_for(job: DraftJob, tokens_per_response: int) -> tuple[Pilot, float]:
    """Choose the pilot of a job.

    Args:
        tokens_per_response: maximum number of tokens of a response and its prompt.

    Returns:
        The pilot, and its expected seconds.

    Raises:
        UserError: the budget is too short for this target on this machine.
    """
    config = TrainConfig.model_validate_json(json.dumps(pilot_config(job, PILOTS[0])))
    costs = expected_costs(config, read_target_config(resolve_target(job.target)))
    pilot = choose_pilot(job.budget_s, costs, tokens_per_response, job.processes)
    if pilot is not None:
        return pilot, costs.seconds(pilot, tokens_per_response, job.processes)

    step_s = costs.step_flops / costs.flops_per_s / EXPECTED_EFFICIENCY
    least = math.ceil(costs.least_budget(tokens_per_response, job.processes) / 60)
    raise UserError(
        f"--budget {job.budget} is too short for {job.target} on this machine: a step of training takes "
        f"about {step_s:.1f} s ({costs.step_flops / 1e9:.0f} GFLOP at {EXPECTED_EFFICIENCY:.0%} of "
        f"{costs.flops_per_s / 1e9:.0f} GFLOP/s, measured now).",
        f"Give at least {_duration(least)}, or a smaller target.",
    )


def _duration(minutes: int) -> str:
    """``"45m"`` or ``"2h30m"``, as ``--budget`` takes it."""
    hours, rest = divmod(minutes, 60)
    if not hours:
        return f"{rest}m"
    if not rest:
        return f"{hours}h"
    return f"{hours}h{rest}m"


def choose_pilot(
    budget_s: float, costs: ExpectedCosts, tokens_per_response: int, processes: int
) -> Pilot | None:
    """The most exact pilot that takes at most :data:`SHARE` of a budget; None if the budget is too short."""
    if budget_s < costs.least_budget(tokens_per_response, processes):
        return None
    for pilot in PILOTS:
        if costs.seconds(pilot, tokens_per_response, processes) <= SHARE * budget_s:
            return pilot
    return None


def expected_costs(config: TrainConfig, target: TargetConfig) -> ExpectedCosts:
    """Expected costs of responses of ``target`` and of training by ``config``, without weights or data."""
    # The rate of a matmul in the precision of the run; "auto" is bfloat16 on a GPU.
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = torch.float32
    if config.training.precision == "bfloat16" or (on_gpu and config.training.precision == "auto"):
        dtype = torch.bfloat16
    rate = measure_matmul_rate(device, dtype)

    # A training step on full rows.
    draft = head_architecture(config, target, None)
    costs = RunCosts(config, target, draft, is_gpu=on_gpu)
    tokens = LEAST_ROWS * ROW_TOKENS
    work = make_workload(config, tokens, SUPERVISED * tokens, LEAST_ROWS, ROW_TOKENS / 2)
    seconds = costs.step_seconds(work, 1, ProcessLayout(), Rates(rate * EXPECTED_EFFICIENCY))

    # A token of a response is multiplied with every active weight and the output layer.
    active, total = num_weights(target)
    active += target.hidden_size * target.vocab_size
    return ExpectedCosts(
        loading=START_S + 4 * total / READ_BYTES_PER_S,
        response_token=2 * active / (rate * DECODING_EFFICIENCY),
        row_token=seconds / tokens,
        step_flops=seconds * rate * EXPECTED_EFFICIENCY,
        flops_per_s=rate,
    )


def pilot_figures(run: Path, steps: int) -> dict[str, float]:
    """Read the figures of a pilot's training from its run folder.

    Returns:
        Medians over the later half of its ``steps``: ``tokens_per_s``, and ``kept_tokens_per_s`` without the
        target's forward. Mean ``tokens_per_conversation``.
    """
    rates = []
    rates_without_capture = []
    for row in JsonLines(run / "metrics.jsonl").rows()[steps // 2 :]:
        seconds = row["tokens"] / row["tokens_per_s"]
        rates.append(row["tokens_per_s"])
        rates_without_capture.append(row["tokens"] / (seconds - row["seconds"]["capture"]))
    seen = read_object(run / f"step-{steps}" / "eagle_kit.json")["data"]
    return {
        "tokens_per_s": statistics.median(rates),
        "kept_tokens_per_s": statistics.median(rates_without_capture),
        "tokens_per_conversation": seen["tokens"] / seen["conversations"],
    }
