"""Confidences that are wrong by depth, learnt from what is accepted."""

import math
import random

import numpy as np
import pytest

from eagle_kit.autotune.chances import chance_of
from eagle_kit.autotune.confidence_calibration import MOST_SLOPE, Calibration

DEPTHS = 5
TOO_SURE = [(1.0, 0.0), (0.7, -0.3), (0.6, -0.6), (0.5, -0.9), (0.5, -1.2)]
"""By depth, slope and offset of the true log-odds over the told ones: the deeper, the more too sure."""


def replay(lines, num_cycles, seed=0, text=0.0):
    """Cycles of chains: (told log-odds, whether each depth would be accepted); texts are off by normal errors
    with the deviation ``text``, others every 20 cycles."""
    rng = random.Random(seed)
    for cycle in range(num_cycles):
        if cycle % 20 == 0:
            off = rng.gauss(0.0, text)
        told = [rng.gauss(1.0, 1.5) for _ in lines]
        true = [slope * each + offset + off for each, (slope, offset) in zip(told, lines, strict=True)]
        yield told, [rng.random() < chance_of(each) for each in true]


def expected_error(pairs):
    """Expected calibration error of (chance, outcome) pairs in ten bins."""
    chances, outcomes = np.array(pairs, dtype=float).T
    bins = np.minimum((10 * chances).astype(int), 9)
    gaps = [
        abs(chances[bins == b].mean() - outcomes[bins == b].mean()) * (bins == b).sum() for b in set(bins)
    ]
    return sum(gaps) / len(chances)


@pytest.mark.parametrize(("text", "bound"), [(0.0, 0.03), (0.7, 0.045)])
def test_errors_by_depth_become_small(text, bound):
    """Of what is told 7 to 20 % at the depths that are too sure, of what is made of it a few."""
    calibration = Calibration()
    told, ours = ([[] for _ in range(DEPTHS)] for _ in range(2))
    for cycle, (odds, outcomes) in enumerate(replay(TOO_SURE, 8000, text=text)):
        accepted = next((d for d, hit in enumerate(outcomes) if not hit), DEPTHS)
        if cycle >= 2000:
            reached = calibration.log_odds(odds)[: accepted + 1]
            for depth, each in enumerate(reached):
                told[depth].append((chance_of(odds[depth]), outcomes[depth]))
                ours[depth].append((chance_of(each), outcomes[depth]))
        calibration.learn(odds, accepted)
    before, after = [expected_error(pairs) for pairs in told], [expected_error(pairs) for pairs in ours]
    assert min(before[1:]) > 0.06, before
    assert max(after) < bound, after


def test_lines_are_found_and_right_confidences_stay():
    for true in (TOO_SURE, [(1.0, 0.0)] * DEPTHS):
        calibration = Calibration()
        for odds, outcomes in replay(true, 20000, seed=1):
            calibration.learn(odds, next((d for d, hit in enumerate(outcomes) if not hit), DEPTHS))
        for line, (slope, offset) in zip(calibration.lines[:DEPTHS], true, strict=True):
            assert line.slope == pytest.approx(slope, abs=0.12)
            assert line.offset == pytest.approx(offset, abs=0.25)


def test_depths_behind_a_rejected_one_teach_nothing():
    calibration = Calibration()
    calibration.learn([0.5, 0.5, 0.5], 1)
    first, second, third, *_ = calibration.lines
    assert first.at(0.5) > 0.5 > second.at(0.5) and third.at(0.5) == 0.5
    calibration.learn([], 0)
    assert calibration.log_odds([0.0, 0.0, 2.0])[2] == 2.0


def test_no_outcomes_break_it():
    """Extreme odds, and the same outcome for ever, leave numbers within their bounds."""
    calibration = Calibration()
    for cycle in range(5000):
        odds = (9.2, -9.2)[cycle % 2]
        calibration.learn([odds, odds], 0 if odds > 0 else 1)  # the other way round
    for line in calibration.lines:
        assert 0.0 <= line.slope <= MOST_SLOPE and math.isfinite(line.offset)
        assert line.slope_variance > 0 and line.offset_variance > 0
        assert line.covariance**2 <= line.slope_variance * line.offset_variance * (1 + 1e-9)
    assert calibration.lines[0].at(9.2) < 9.2
