"""Acceptance predicted from one recording, against decoding in each shape."""

import pytest
from sweep import sweep
from tiny_engine import PROMPTS, decode, resolved

from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import NO_SPECULATION, SpecShape
from eagle_kit.core.stats import SpecStats
from eagle_kit.drafts.base.draft_model import HeadDraftModel
from eagle_kit.engine.calibrate.record_drafts import record_drafts
from eagle_kit.engine.request import Request
from eagle_kit.engine.text_stream import TextStream

WIDE = SpecShape(6, 8, 64)


def requests_of(prompts=PROMPTS, max_tokens=30):
    return [Request(i, list(p), SamplingParams(max_tokens=max_tokens)) for i, p in enumerate(prompts)]


@pytest.fixture(scope="module")
def recording(models):
    target, head = models
    return record_drafts(target, HeadDraftModel(head, target), resolved(3, 256), requests_of(), shape=WIDE)


def decoded(models, shape):
    stats = SpecStats()
    for request in decode(models, shape, batch=3, max_tokens=30):
        stats.add(request.stats.spec)
    return stats


@pytest.mark.parametrize("shape", sweep(["1,1,2", "4,1,5", "6,1,7"], fast=["1,1,2", "6,1,7"]))
def test_chains_are_predicted_to_the_verify(models, recording, shape):
    stats = decoded(models, shape)
    predicted = recording.acceptance(SpecShape.parse(shape))
    assert predicted.length == stats.accept_length > 1.05
    assert [share for share in predicted.reach if share] == stats.acceptance_per_position


@pytest.mark.parametrize(
    "shape",
    sweep(
        ["2,8,5", "6,8,64", "6,8,20", "1,8,9", "2,8,16", "4,8,30"],
        fast=["2,8,5", "6,8,20", "1,8,9", "4,8,30"],
    ),
)
def test_trees_of_the_recorded_width_are_predicted_to_the_verify(models, recording, shape):
    stats = decoded(models, shape)
    assert recording.acceptance(SpecShape.parse(shape)).length == stats.accept_length > 1.05


@pytest.mark.parametrize(
    "shape", sweep(["3,2,6", "5,4,16", "4,4,12", "6,3,20", "2,6,12"], fast=["3,2,6", "5,4,16"])
)
def test_narrower_trees_are_predicted_but_for_nodes_that_a_wider_one_did_not_extend(models, recording, shape):
    stats = decoded(models, shape)
    assert recording.acceptance(SpecShape.parse(shape)).length == pytest.approx(stats.accept_length, rel=0.03)


def test_plain_decoding_accepts_nothing(recording):
    assert recording.acceptance(NO_SPECULATION) == (1.0, ())


def test_a_shape_beyond_the_recording_is_refused(recording):
    with pytest.raises(ValueError, match="no 7,1"):
        recording.acceptance(SpecShape(7, 1, 8))


@pytest.mark.parametrize("options", [{"tree": "static"}, {"sampled_drafts": True}], ids=str)
def test_drafts_that_cannot_be_predicted_are_refused(models, options):
    target, head = models
    with pytest.raises(UserError, match="not recorded"):
        record_drafts(target, HeadDraftModel(head, target), resolved(1, 64, **options), requests_of())


def test_each_response_that_ends_is_told(models):
    target, head = models
    ended = []
    requests = requests_of(max_tokens=4)
    draft = HeadDraftModel(head, target)
    record_drafts(target, draft, resolved(2, 64), requests, shape=WIDE, on_finish=lambda: ended.append(1))
    assert len(ended) == len(requests)


def test_responses_without_a_cycle_record_nothing(models):
    target, head = models
    with pytest.raises(UserError, match="too short"):
        record_drafts(target, HeadDraftModel(head, target), resolved(1, 64), requests_of(max_tokens=1))


def test_stop_texts_end_responses_whatever_the_lag(models):
    """What is recorded is decoded without a lag, so a stop text is found in its step."""

    class Letters:
        def decode(self, ids, skip_special_tokens=True):
            return "".join(chr(97 + token % 26) for token in ids)

        def get_added_tokens_decoder(self):
            return {}

        def token_to_id(self, name):
            return None

    def letters(stop):
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        return Request(0, [1, 2, 3], params, stream=TextStream(Letters(), stop=stop))

    target, head = models
    draft = HeadDraftModel(head, target)
    whole = letters(())
    record_drafts(target, draft, resolved(1, 64, lag=1), [whole], shape=WIDE)
    stop = whole.decode_text()[12:15]
    cut = letters((stop,))
    record_drafts(target, draft, resolved(1, 64, lag=1), [cut], shape=WIDE)
    end = whole.decode_text().index(stop) + 3
    assert cut.token_ids == whole.token_ids[:end] and cut.finish_reason == "stop" and end < 30
