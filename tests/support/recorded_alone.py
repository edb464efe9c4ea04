"""A recording in a process of its own, which shows what a recording imports."""

import sys

import torch

from eagle_kit.engine.graphs.cpu_graph import Recording
from eagle_kit.engine.graphs.cuda_graph import Lengths


def record_without_compiler() -> None:
    """Record an addition, and exit with 1 if torch's compiler has been imported for it."""
    none = torch.zeros(1, dtype=torch.int64)
    with torch.no_grad():
        recording = Recording(lambda x: x + 1, torch.zeros(3))
        recording.compile(Lengths(none, none))
        assert recording.replay(torch.ones(3)).tolist() == [2.0] * 3
    sys.exit("torch._dynamo" in sys.modules)
