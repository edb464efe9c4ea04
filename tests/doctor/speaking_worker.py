"""A process of checks without torch, for tests of the processes: a check's name says what it does.

`raise` answers as behind an exception, `segfault` dies, `hang` never answers, `disabled` answers with
EAGLE_KIT_DISABLE; other names pass. With SPEAKING_WORKER=broken it ends before it is ready.
"""

import faulthandler
import json
import os
import signal
import sys
import time


def answer(**values: object) -> None:
    """Write a line."""
    print(json.dumps(values), flush=True)


def main() -> None:
    """Answer requests."""
    faulthandler.register(signal.SIGUSR1)
    if os.environ.get("SPEAKING_WORKER") == "broken":
        sys.exit("no driver here")
    answer(ready=True)
    for line in sys.stdin:
        name = json.loads(line)["check"]
        if name.startswith("segfault"):
            os.kill(os.getpid(), signal.SIGSEGV)
        if name.startswith("hang"):
            time.sleep(600)
        fails = name.startswith(("raise", "wrong"))
        detail = os.environ["EAGLE_KIT_DISABLE"] if name == "disabled" else str(os.getpid())
        has_raised = name.startswith("raise")
        answer(passed=not fails, detail=detail, values={}, seconds=0.1, raised=has_raised)
        if has_raised:
            return


if __name__ == "__main__":
    main()
