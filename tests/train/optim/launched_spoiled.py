"""Run by accelerate's launcher in tests of several processes: ``launched_spoiled.py CONFIG OUT KIND``.

Trains with one process, the last, whose loss (KIND ``loss``) or whose gradient alone (``gradient``) is NaN in
the steps :data:`SPOILED`; every process writes what it had after each step, and how its run ended, to
``OUT/process-N.json``.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from eagle_kit.objective.ttt_module import TTTModule
from eagle_kit.train.__main__ import main
from eagle_kit.train.run import step as run_step
from eagle_kit.train.run.checkpoint import TrainState

SPOILED = (2, 4, 5, 6)


class NaNGradient(torch.autograd.Function):
    """The identity, with a gradient that is not finite."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * float("nan")


def digest(value: Any) -> str:
    """Hash of tensors, numbers and containers of them."""
    found = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            found.update(part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(part, dict):
            for name in sorted(part, key=str):
                found.update(str(name).encode())
                add(part[name])
        elif isinstance(part, list | tuple):
            for each in part:
                add(each)
        else:
            found.update(repr(part).encode())

    add(value)
    return found.hexdigest()


class Watch:
    """Spoils steps of this process, and notes what the process had after every step."""

    def __init__(self, kind: str, spoils: bool) -> None:
        self.kind, self.spoils, self.step, self.rows = kind, spoils, 0, []
        forward, take = TTTModule.forward, run_step.Stepper.step
        watch = self

        def spoiled(module: TTTModule, *args: Any) -> Any:
            out = forward(module, *args)
            if not (watch.spoils and watch.step in SPOILED and args[0] is not None):
                return out
            loss = out.loss * float("nan") if watch.kind == "loss" else NaNGradient.apply(out.loss)
            return out._replace(loss=loss)

        def watched(stepper: run_step.Stepper, state: TrainState) -> run_step.StepResult:
            watch.step = state.step + 1
            result = take(stepper, state)
            watch.note(stepper, state, result)
            return result

        TTTModule.forward, run_step.Stepper.step = spoiled, watched  # type: ignore[method-assign]

    def note(self, stepper: Any, state: TrainState, result: run_step.StepResult) -> None:
        """Add a row: what all processes must share."""
        self.rows.append(
            {
                "step": state.step,
                "skipped": state.num_skipped,
                "finite": result.is_finite,
                "weights": digest(stepper.strategy.whole_head().state_dict()),
                "moments": digest(stepper.strategy.optimizer_state()["state"]),
                "random": digest(torch.get_rng_state()),
            }
        )


def run(config: str, out: Path, kind: str) -> None:
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    watch = Watch(kind, rank == count - 1)
    code = main([config, "--max-steps", "9", f"output_dir={out / 'run'}"])
    out.mkdir(parents=True, exist_ok=True)
    (out / f"process-{rank}.json").write_text(json.dumps({"code": code, "rows": watch.rows}))


if __name__ == "__main__":
    if "STACKS_AFTER" in os.environ:  # where a process hangs
        import faulthandler

        faulthandler.dump_traceback_later(float(os.environ["STACKS_AFTER"]), exit=True)
    run(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
