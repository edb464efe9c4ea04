"""Cycles of a rank of tensor parallelism on fake CUDA tensors: collectives are on the device as everything
else is, and give as many bytes as their formula says."""

import pytest
import torch
import torch.distributed as dist
from fake_cuda import CUDA, Copies, Device, fake_gpu, to_gpu
from tiny import tiny_head, tiny_target
from tiny_cycle import BATCH, SAMPLING_PARAMS, cycle_engine, cycle_settings, sampling_batch
from tiny_mixtures import DEEPSEEK, untrained
from torch.testing._internal.distributed.fake_pg import FakeStore

from eagle_kit.core.shape import SpecShape
from eagle_kit.kernels.collectives import Ranks
from eagle_kit.kv.own_latents import own_requests
from eagle_kit.models.sharding import Sharding
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.serve.runner import CycleInputs
from eagle_kit.speculation.propose.draft_model import HeadDraftModel

SIZE = 2


class Alone(Ranks):
    """A rank without the others: on the host it agrees with itself, and its collectives are those of torch's
    backend for traces, which reach nobody."""

    def agree(self, value):
        return value

    def all(self, value):
        return [value] * self.size

    def _make_buffers(self):
        return {}


@pytest.fixture(params=range(SIZE))
def ranks(request, monkeypatch):
    new_group = dist.new_group
    monkeypatch.setattr(
        dist, "new_group", lambda backend, timeout: new_group(backend="fake", timeout=timeout)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=SIZE)
    yield Alone(request.param, SIZE, CUDA, timeout_s=1)
    dist.destroy_process_group()


def part_of(target, ranks, **ways):
    """A rank's model of the shape of ``target``."""
    config = Sharding(target.config, ranks.share, **ways).rank_config()
    part = LlamaModel(config, ranks).eval().requires_grad_(False)
    part.take_embedding(torch.nn.Embedding(config.vocab_size, config.hidden_size).requires_grad_(False))
    return part


@pytest.mark.parametrize("sampling", SAMPLING_PARAMS)
@pytest.mark.parametrize("shape", ("none", "4,1,5", "5,4,16"))
def test_a_cycle_of_a_rank_is_on_the_device(ranks, shape, sampling):
    trace(part_of(tiny_target(), ranks), shape, sampling)


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_a_cycle_of_shared_experts_and_latents_is_on_the_device(ranks, expert_parallel):
    target = untrained(DEEPSEEK["v3: sigmoid gate with bias, groups"])
    trace(part_of(target, ranks, expert_parallel=expert_parallel), "5,4,16", "greedy")


@pytest.mark.parametrize("sampling", SAMPLING_PARAMS)
@pytest.mark.parametrize("shape", ("none", "4,1,5", "5,4,16"))
def test_a_cycle_of_a_rank_with_latents_of_its_own_is_on_the_device(ranks, shape, sampling):
    """Of 3 requests this rank has one, the other one two: each gives the rows of two, one of them padding
    here."""
    target = untrained(DEEPSEEK["v3: sigmoid gate with bias, groups"])
    parts = [1 - ranks.rank, ranks.rank, 1 - ranks.rank]
    trace(part_of(target, ranks, attends_whole=True), shape, sampling, parts)


def trace(target, shape, sampling, parts=None):
    """Trace a cycle, of requests whose latents are of the ranks ``parts`` where ranks have some of their
    own."""
    head, config, ranks = tiny_head(target), target.config, target.ranks
    options = {} if parts is None else {"tensor_parallel": SIZE, "data_parallel_attention": True}
    with fake_gpu("9.0"), torch.no_grad():
        to_gpu(target), to_gpu(head)
        engine = cycle_engine(target, HeadDraftModel(head, target), shape, **options)
        runner, rows = engine.runner, torch.arange(BATCH, device=CUDA)
        with Copies():
            batch, own = sampling_batch(sampling, config.vocab_size, CUDA), None
            if parts is not None:
                own = own_requests(parts, ranks.share, 2, BATCH, CUDA)
        if batch is not None and batch.counts is not None:
            runner.slots.make_tables(config.vocab_size)
        volume = ranks.volume
        volume.clear()
        settings = cycle_settings(engine, shape)
        if sampling == "greedy":  # where no log-probabilities are told, logits stay on their ranks
            settings = settings._replace(num_logprobs=None)
        with Device() as guard:
            out = runner.run_cycle(CycleInputs(rows, batch, own=own), settings)
    assert out.tokens.device == CUDA and guard.num_operations > 50
    nodes, steps = BATCH * SpecShape.parse(shape).tokens, SpecShape.parse(shape).steps
    states = config.num_layers * config.hidden_size * target.embed_tokens.weight.element_size()
    gathered = 0 if own is None else len(own.rows) * SpecShape.parse(shape).tokens
    assert volume["sum"] == (2 if own is None else 1) * nodes * states
    assert volume["first"] == 8 * BATCH * (2 * (steps + 1) + 1) + 32 * nodes * (steps > 0)
    of_node = 16  # the best logit and its token
    if sampling != "greedy":
        of_node = -(-config.vocab_size // SIZE) * target.lm_head.weight.element_size()
    assert volume["stack"] == of_node * nodes + gathered * states
