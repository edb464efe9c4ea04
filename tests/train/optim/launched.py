"""Run by accelerate's launcher in tests of several processes: ``launched.py CONFIG OUT [NAME=SETTING ...]``.

Trains 6 steps with a checkpoint after 3 (``OUT/whole``), goes on from a copy of that checkpoint
(``OUT/resumed``), and trains 2 steps under each setting that is named (``OUT/NAME``), in one process group.
"""

import os
import shutil
import sys
from pathlib import Path

from eagle_kit.config.loading.loader import load_config
from eagle_kit.config.train import TrainConfig
from eagle_kit.train.parallel.launch import check_launcher
from eagle_kit.train.parallel.processes import make_accelerator
from eagle_kit.train.run.folder import RunFolder
from eagle_kit.train.run.loop import Ending, RunOptions, Trainer


def run_all(config_file: str, out: Path, named: list[str]) -> None:
    common = ["training.save_every=3", "training.keep_last=9", "training.precision=float32"]
    first = load_config(TrainConfig, config_file, common)
    check_launcher(os.environ, first.training)
    accelerator = make_accelerator(first)
    rank, count = accelerator.process_index, accelerator.num_processes

    def run(name: str, steps: int, *settings: str, resume: bool = False) -> None:
        config = load_config(TrainConfig, config_file, [*common, *settings, f"output_dir={out / name}"])
        options = RunOptions(resume=resume, max_steps=steps)
        ending = Trainer(config, options, RunFolder(config.output_dir), accelerator).run()
        assert ending in (Ending.DONE, Ending.MAX_STEPS)
        accelerator.wait_for_everyone()

    run("whole", 6)
    if rank == 0:
        shutil.copytree(out / "whole", out / "resumed", ignore=shutil.ignore_patterns("step-6"))
    accelerator.wait_for_everyone()
    run("resumed", 6, resume=True)
    for text in named:
        name, _, setting = text.partition("=")
        run(name, 2, *setting.split())
    if rank == 0:
        (out / "done").write_text(str(count))
    accelerator.wait_for_everyone()
    accelerator.end_training()  # as train() does: a process group left to the interpreter's end may abort


if __name__ == "__main__":
    if "STACKS_AFTER" in os.environ:  # where a process hangs
        import faulthandler

        faulthandler.dump_traceback_later(float(os.environ["STACKS_AFTER"]), exit=True)
    run_all(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
