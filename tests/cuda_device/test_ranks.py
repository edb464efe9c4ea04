"""Cycles of a rank of tensor parallelism can be captured: collectives are on the device as all else is, and
give as many bytes as their formula says. They reach nobody, by torch's process group for traces."""

import pytest
import torch
from tiny import tiny_head, tiny_target
from tiny_cycle import BATCH, SAMPLING_PARAMS, cycle_engine, cycle_settings, sampling_batch
from tiny_mixtures import untrained

from eagle_kit.core.shape import SpecShape
from eagle_kit.distributed.collectives import Ranks
from eagle_kit.drafts.base.draft_model import HeadDraftModel
from eagle_kit.engine.graphs.cuda_graph import Graph
from eagle_kit.engine.padded_prompts import pack_prompts
from eagle_kit.engine.runner import CycleInputs
from eagle_kit.kv.dp_latents import shard_requests
from eagle_kit.models.sharding import Sharding
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.ops.transfer import to_device
from tests.cuda_device.host_tensors import OnDeviceOnly
from tests.cuda_device.ranks import fake_group
from tests.cuda_device.targets import LATENTS

CUDA = torch.device("cuda", 0)
SIZE = 2
SHAPES = ("none", "4,1,5", "5,4,16")


class Alone(Ranks):
    """A rank without the others, which on the host agrees with itself."""

    def agree(self, value):
        return value

    def all(self, value):
        return [value] * self.size

    def _make_buffers(self):
        return {}


@pytest.fixture(params=range(SIZE))
def ranks(request):
    with fake_group(request.param, SIZE):
        yield Alone(request.param, SIZE, CUDA, timeout_s=1)


def part_of(target, ranks, **options):
    """A rank's model of the shape of ``target``."""
    config = Sharding(target.config, ranks.share, **options).rank_config()
    part = LlamaModel(config, ranks).eval().requires_grad_(False)
    part.take_embedding(torch.nn.Embedding(config.vocab_size, config.hidden_size).requires_grad_(False))
    return part


@pytest.mark.parametrize("sampling", SAMPLING_PARAMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_cycle_of_a_rank(ranks, shape, sampling):
    capture_cycle(part_of(tiny_target(), ranks), shape, sampling)


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_a_cycle_of_shared_experts_and_latents(ranks, expert_parallel):
    target = untrained(LATENTS["v3"])
    capture_cycle(part_of(target, ranks, expert_parallel=expert_parallel), "5,4,16", "greedy")


@pytest.mark.parametrize("sampling", SAMPLING_PARAMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_cycle_of_a_rank_with_latents_of_its_own(ranks, shape, sampling):
    """Of 3 requests this rank has one, the other one two: each gives the rows of two, one of them padding
    here."""
    target = untrained(LATENTS["v3"])
    parts = [1 - ranks.rank, ranks.rank, 1 - ranks.rank]
    capture_cycle(part_of(target, ranks, data_parallel_attention=True), shape, sampling, parts)


def test_a_prompt_of_fixed_shape_of_a_rank(ranks):
    """All sums of its layers and of the embedding are captured."""
    target = part_of(tiny_target(), ranks).to(CUDA, torch.bfloat16)
    draft = HeadDraftModel(tiny_head(target).to(CUDA, torch.bfloat16), target)
    runner = cycle_engine(target, draft, "4,1,5", graph_mode="cycle", tensor_parallel=SIZE).runner
    shape = runner.prompt_shapes[-1]
    numbers = to_device(pack_prompts([], shape, runner.slots.dummy), CUDA)
    ranks.volume.clear()

    def body(numbers):
        ranks.volume.clear()
        with OnDeviceOnly():
            return runner._run_target_over_prompts(numbers, shape)

    with torch.inference_mode():
        Graph(body, numbers).replay()
    config = target.config
    states = config.num_layers * config.hidden_size * target.embed_tokens.weight.element_size()
    assert ranks.volume["sum"] == 2 * shape.rows * states


def capture_cycle(target, shape, sampling, parts=None) -> None:
    """Capture a cycle, of requests whose latents are of the ranks ``parts`` where ranks have some of their
    own, and compare the bytes of its collectives with their formula."""
    config = target.config
    ranks = target.ranks
    head = tiny_head(target).to(CUDA, torch.bfloat16)
    target.to(CUDA, torch.bfloat16)
    options = {} if parts is None else {"tensor_parallel": SIZE, "data_parallel_attention": True}
    engine = cycle_engine(target, HeadDraftModel(head, target), shape, **options)
    runner = engine.runner
    rows = torch.arange(BATCH, device=CUDA)
    batch = sampling_batch(sampling, config.vocab_size, CUDA)
    shard = None
    if parts is not None:
        shard = shard_requests(parts, ranks.share, 2, BATCH, CUDA)
    if batch is not None and batch.counts is not None:
        runner.slots.make_tables(config.vocab_size)
    settings = cycle_settings(engine, shape)
    if sampling == "greedy":  # without log-probabilities, logits stay on their ranks
        settings = settings._replace(num_logprobs=None)
    volume = ranks.volume

    def body(inputs: CycleInputs):
        volume.clear()
        with OnDeviceOnly():
            return runner.run_cycle(inputs, settings)

    with torch.inference_mode():
        Graph(body, CycleInputs(rows, batch, shard=shard))

    parsed = SpecShape.parse(shape)
    nodes = BATCH * parsed.tokens
    states = config.num_layers * config.hidden_size * target.embed_tokens.weight.element_size()
    gathered = 0 if shard is None else len(shard.rows) * parsed.tokens
    num_sums = 2 if shard is None else 1
    assert volume["sum"] == num_sums * nodes * states
    assert volume["first"] == 8 * BATCH * (2 * (parsed.steps + 1) + 1) + 32 * nodes * (parsed.steps > 0)
    of_node = 16  # the best logit and its token
    if sampling != "greedy":
        of_node = -(-config.vocab_size // SIZE) * target.lm_head.weight.element_size()
    assert volume["stack"] == of_node * nodes + gathered * states
