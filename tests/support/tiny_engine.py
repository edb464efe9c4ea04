"""An engine around tiny random models, and requests that run it."""

from eagle_kit.config.engine import EngineConfig, ResolvedConfig
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.drafts.base.draft_model import HeadDraftModel
from eagle_kit.engine.engine import Engine
from eagle_kit.engine.request import Request

PROMPTS = [[(7 * i + j * j) % 11 for j in range(3 + 9 * i)] for i in range(5)]


def resolved(batch: int, max_context: int, **options) -> ResolvedConfig:
    """Options of an engine on a CPU, without recordings."""
    sizes = {"max_batch_size": batch, "max_context": max_context, "graph_mode": "off"}
    return EngineConfig(**{**sizes, **options}).resolve(on_gpu=False)


def make_engine(models, batch=1, page_size=16, max_context=256, kv_tokens=None, **options) -> Engine:
    target, head = models
    tokens = kv_tokens or batch * (max_context + 200)
    draft = None if head is None else HeadDraftModel(head, target)
    return Engine(
        target, draft, resolved(batch, max_context, page_size=page_size, kv_tokens=tokens, **options)
    )


def serve(engine, requests) -> None:
    """Serve ``requests`` to their ends, the pool checked after every step."""
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        engine.step()
        engine.check()
    assert engine.page_pool.num_available == engine.page_pool.num_pages


def decode(
    models, shape=None, batch=1, page_size=16, max_context=256, prompts=PROMPTS, options=None, **params
) -> list[Request]:
    engine = make_engine(models, batch, page_size, max_context, **(options or {}))
    engine.use_shape(SpecShape.parse(shape))
    params = SamplingParams(**{"max_tokens": 40, **params})
    requests = [Request(i, list(p), params) for i, p in enumerate(prompts)]
    serve(engine, requests)
    return requests


def record_proposals(engine) -> list:
    """Record from now on what the engine, of one request, proposes: tokens in the pool, and the draft."""
    proposals, propose = [], engine.runner.drafter.propose

    def recorded(state, *rest):
        proposals.append((state.seq_lens.item(), propose(state, *rest)))
        return proposals[-1][1]

    engine.runner.drafter.propose = recorded
    return proposals


def check_next_turn(models, **options) -> None:
    """A prompt that goes on behind a response finds the whole pages of both, and drafts as without them."""
    engine = make_engine(models, page_size=4, **options)
    engine.use_shape(SpecShape(4, 1, 5))
    first = Request(0, [1, 2, 3], SamplingParams(max_tokens=20))
    serve(engine, [first])
    prompt = [1, 2, 3, *first.token_ids, 9, 9]
    second = Request(1, list(prompt), SamplingParams(max_tokens=20))
    serve(engine, [second])
    assert second.stats.num_cached_tokens == 20
    (fresh,) = decode(models, "4,1,5", prompts=[prompt], max_tokens=20)
    assert (second.token_ids, second.stats.spec) == (fresh.token_ids, fresh.stats.spec)
