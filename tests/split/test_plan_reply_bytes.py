"""What replies weigh, over what the profile tells of them; expected are sums done by hand."""

from __future__ import annotations

import numpy as np
import pytest

from split.plan.reply_bytes import ReplyBytes


@pytest.mark.parametrize("factor", [1000.0, 0.001])
def test_the_first_reply_is_believed_as_it_is(factor: float) -> None:
    weighs = ReplyBytes()
    weighs.observe(400_000.0 * factor, 400_000.0)
    assert weighs.ratio == pytest.approx(factor)
    assert weighs.moved()
    assert not weighs.moved()


def test_of_replies_that_vary_the_mean_is_expected() -> None:
    """0 to 100 detections, 24 KB each, told as 10: the mean of all that came, by numpy."""
    rng, weighs = np.random.default_rng(3), ReplyBytes()
    came = 24_000.0 * rng.integers(0, 101, 50)
    for came_bytes in came:
        weighs.observe(float(came_bytes), 240_000.0)
    assert weighs.ratio * 240_000.0 == pytest.approx(float(came.mean()))
    for _ in range(500):  # and a scene that becomes another one is followed
        weighs.observe(24_000.0, 240_000.0)
    assert weighs.ratio * 240_000.0 == pytest.approx(24_000.0, rel=0.1)


def test_what_a_payload_says_of_its_tensors_is_no_ratio() -> None:
    """Eight bytes of a classifier come as 136; ten kilobytes of another cut's outputs do not weigh seventeen times as
    much."""
    weighs = ReplyBytes()
    weighs.observe(136.0, 8.0)
    assert weighs.ratio == 1.0
    assert not weighs.moved()


def test_where_nothing_was_told_nothing_is_learned() -> None:
    weighs = ReplyBytes()
    weighs.observe(50_000.0, 0.0)
    assert weighs.ratio == 1.0
