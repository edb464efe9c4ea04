"""What `bench engine` builds before it times, on fake CUDA tensors."""

import torch
from fake_cuda import CUDA, Copies, Device, fake_gpu, to_gpu
from tiny import tiny_head, tiny_target

from benchmarks.engine.load import _random_tree, _verify, loaded
from eagle_kit.core.shape import NO_SPECULATION
from eagle_kit.speculation.propose.draft_model import HeadDraftModel


def test_random_windows_are_made_and_verified_on_the_device(monkeypatch):
    monkeypatch.setattr("eagle_kit.serve.memory.free_memory", lambda device: 1 << 33)
    target = tiny_target()
    head = tiny_head(target)
    with fake_gpu():
        to_gpu(target), to_gpu(head)
        llm = loaded(target, HeadDraftModel(head, target), 1, 64, graph_mode="off")
        runner = llm.engine(NO_SPECULATION).runner
        with Copies():
            tree = _random_tree(llm, 8)
            runner.linear_forms.timer = lambda form, size, device: 1.0
        with Device():
            out = _verify(llm, tree, 64)
    assert out.shape == (1, 8) and out.device == CUDA and not torch.cuda.is_initialized()
