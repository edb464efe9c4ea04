"""A rank that rank 0 has started as ``python -m eagle_kit.engine.tensor_parallel.worker``.

The process reads its arguments from standard input. It ends when rank 0 leaves or ends.
"""

import os
import pickle
import sys
import threading
import warnings

from eagle_kit.core.errors import RankLost, UserError
from eagle_kit.engine.tensor_parallel.ranks import WorkerArgs


def main() -> int:
    """Run the rank; returns the exit code."""
    # Rank 0 waits until the arguments are read, so this comes before the slow import.
    worker: WorkerArgs = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_rank_0, daemon=True).start()

    # Rank 0 shows the same warnings and errors to the user.
    warnings.simplefilter("ignore")
    from eagle_kit.engine.llm import LLM

    try:
        LLM(worker.target, worker.draft, worker.config, worker=worker)
    except (UserError, RankLost):
        return 1
    return 0


def _end_with_rank_0() -> None:
    """End this process when rank 0 ends, which closes the standard input."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
