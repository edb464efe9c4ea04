"""DeepSeek-V2, V3 and related models against transformers, on tiny random models of each config."""

import pytest
import torch
from tiny_mixtures import DEEPSEEK, randomised, run

from eagle_kit.models.loading.loader import load_target
from eagle_kit.objective.target_features import capture_features


@pytest.mark.parametrize("name", DEEPSEEK)
def test_logits_and_captured_states_equal_those_of_transformers(name, tmp_path):
    theirs = randomised(DEEPSEEK[name])
    theirs.save_pretrained(tmp_path)
    ours = load_target(tmp_path)
    layers = theirs.config.num_hidden_layers
    for length in (1, 37, 201):
        ids = torch.randint(0, 271, (length,), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            want = theirs(ids[None], output_hidden_states=True)
            got = run(ours, ids, capture=tuple(range(layers)))
            logits = ours.logits(got.hidden)
        scale = want.logits.abs().max()
        assert scale > 1
        assert (logits - want.logits[0]).abs().max() < 2e-5 * scale
        for i, state in enumerate(got.aux_hidden_states.chunk(layers, -1)):
            expected = want.hidden_states[i][0]
            assert (state - expected).abs().max() < 2e-5 * expected.abs().max(), f"input of layer {i}"


def test_states_of_a_packed_row_are_those_of_its_documents(tmp_path):
    """Captured states of a packed sequence."""
    randomised(DEEPSEEK["v3: YaRN"]).save_pretrained(tmp_path)
    target = load_target(tmp_path)
    ids = torch.randint(0, 271, (60,), generator=torch.Generator().manual_seed(0))
    doc_start = torch.tensor([0] * 23 + [23] * 37)
    found = capture_features(target, ids, doc_start, (1, 2, 4), torch.ones(60, dtype=torch.bool))
    with torch.no_grad():
        apart = [run(target, part, (1, 2, 4)) for part in ids.split((23, 37))]
    assert (found.aux_hidden_states - torch.cat([out.aux_hidden_states for out in apart])).abs().max() < 1e-4
    assert torch.equal(found.argmax, torch.cat([target.logits(out.hidden) for out in apart]).argmax(-1))
