"""The engine's device is the current one in every call that computes, whichever thread makes it."""

import json
import os
import subprocess
import sys

from tests.cuda_device import device
from tests.cuda_device.device import ROOT

SCRIPT = """
import json
import threading

import torch

from tests.cuda_device import device

device.start()
from tests.cuda_device.engines import made_up_results, small_llm
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.engine.runner import Runner
from eagle_kit.engine.graphs.warm_up import warm_up

with torch.cuda.device(1):
    llm = small_llm("3,1,4")
    engine = llm.engine()
seen = set()


def watch(name):
    method = getattr(Runner, name)

    def watched(*args, **kwargs):
        seen.add((name, torch.cuda.current_device()))
        return method(*args, **kwargs)

    setattr(Runner, name, watched)


def serve():
    # The current device of a new thread is 0.
    seen.add(("thread", torch.cuda.current_device()))
    with made_up_results():
        warm_up(engine, "usual")
        for prompt in ([1, 2, 3], [4] * 40):
            engine.add_request(llm.make_request(prompt, SamplingParams(max_tokens=6, ignore_eos=True)))
        while engine.has_work:
            engine.step()
    seen.add(("thread", torch.cuda.current_device()))


for name in ("prefill", "decode", "run_idle"):
    watch(name)
thread = threading.Thread(target=serve)
thread.start()
thread.join()
refused = [str(call) for call in device.calls() if call.kind == device.LogKind.ILLEGAL_CALL]
bytes_of = [torch.cuda.memory_reserved(number) for number in range(2)]
print(json.dumps([sorted(seen), bytes_of, refused]))
"""


def test_an_engine_of_the_second_device_takes_nothing_of_the_first():
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "support")))
    settings = {"EAGLE_KIT_DEVICE_COUNT": "2", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=device.environment(settings),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    seen, bytes_of, refused = json.loads(done.stdout.splitlines()[-1])
    assert seen == [["decode", 1], ["prefill", 1], ["run_idle", 1], ["thread", 0]]
    assert bytes_of[0] == 0 and bytes_of[1] > 0
    assert not refused
