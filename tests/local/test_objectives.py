"""The losses against MATH's reference vectors and against differences, and what must not leak from masked tokens."""

from __future__ import annotations

import math
import random

import pytest

from whitney_loop.local.objectives import LOG_RATIO_LIMIT, OBJECTIVES

INFINITY, NAN = math.inf, math.nan

# From automatic differentiation in float64, elsewhere.
V1 = (
    [-1.0, -0.5, -2.0],
    {"logprobs": [-1.2, -0.5, -1.5], "advantages": [1.0, -1.0, 2.0], "weights": [1.0, 1.0, 1.0]},
)
V2 = (
    [-3.0, -0.1, -0.3, -2.5, -0.2],
    {
        "logprobs": [0.0, -1.5, -1.2, -0.4, -0.9],
        "advantages": [0.0, 1.5, -0.5, -2.0, 0.7],
        "weights": [0.0, 1.0, 1.0, 0.5, 1.0],
    },
)
REFERENCES = [
    ("cross_entropy", V1, 3.5, [-1, -1, -1]),
    ("importance_sampling", V1, -1.434464, [-1.221403, 1, -1.213061]),
    ("cross_entropy", V2, 1.85, [0, -1, -1, -0.5, -1]),
    ("importance_sampling", V2, -6.140169, [0, -6.0828, 1.229802, 0.122456, -1.409627]),
]


@pytest.mark.parametrize(("name", "vector", "loss", "slopes"), REFERENCES)
def test_value_and_gradient_are_those_of_the_reference_vectors(name, vector, loss, slopes):
    p, tensors = vector
    found_loss, found_slopes = OBJECTIVES[name](p, tensors, {})
    assert found_loss == pytest.approx(loss, abs=1e-6)
    assert found_slopes == pytest.approx(slopes, abs=1e-6)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_the_gradient_is_that_of_the_value_by_central_differences(name):
    rng = random.Random(f"differences of {name}")
    n = 12
    p = [-rng.expovariate(0.5) for _ in range(n)]
    tensors = {
        "logprobs": [x + rng.uniform(-0.6, 0.6) for x in p],
        "advantages": [rng.gauss(0, 1) for _ in range(n)],
        "weights": [rng.choice([0.0, 0.3, 1.0, 1.7]) for _ in range(n)],
    }
    _, slopes = OBJECTIVES[name](p, tensors, {})
    step = 1e-6
    for t in range(n):
        above, _ = OBJECTIVES[name]([x + step * (i == t) for i, x in enumerate(p)], tensors, {})
        below, _ = OBJECTIVES[name]([x - step * (i == t) for i, x in enumerate(p)], tensors, {})
        assert slopes[t] == pytest.approx((above - below) / (2 * step), abs=1e-7)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
@pytest.mark.parametrize("garbage", [NAN, INFINITY, -INFINITY])
def test_nothing_leaks_from_a_masked_position(name, garbage):
    clean = {"weights": [1.0, 0.0, 0.5], "logprobs": [-1.0, -1.0, -2.0], "advantages": [1.0, 1.0, -1.0]}
    dirty = {
        "weights": clean["weights"],
        "logprobs": [-1.0, garbage, -2.0],
        "advantages": [1.0, garbage, -1.0],
    }
    p = [-1.1, -0.3, -2.2]
    assert OBJECTIVES[name]([-1.1, garbage, -2.2], dirty, {}) == OBJECTIVES[name](p, clean, {})
    assert OBJECTIVES[name](p, dirty, {})[1][1] == 0.0


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_a_datum_that_is_masked_completely_is_exactly_zero(name):
    tensors = {"weights": [0.0, 0.0], "logprobs": [NAN, -1.0], "advantages": [1.0, INFINITY]}
    assert OBJECTIVES[name]([-1.0, -2.0], tensors, {}) == (0.0, [0.0, 0.0])


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_a_nan_at_a_position_that_counts_makes_the_loss_nan(name):
    tensors = {"weights": [1.0], "logprobs": [NAN], "advantages": [1.0]}
    assert math.isnan(OBJECTIVES[name]([NAN], tensors, {})[0])


@pytest.mark.parametrize(("sign", "log_ratio"), [(1, 20.5), (1, 800.0), (-1, -20.5), (-1, -800.0)])
def test_a_ratio_beyond_the_limit_is_cut_and_has_no_gradient(sign, log_ratio):
    tensors = {"weights": [1.0], "logprobs": [-900.0], "advantages": [2.0]}
    loss, slopes = OBJECTIVES["importance_sampling"]([-900.0 + log_ratio], tensors, {})
    assert loss == pytest.approx(-2 * math.exp(sign * LOG_RATIO_LIMIT))
    assert slopes == [0.0]


def test_a_ratio_at_the_limit_still_has_its_gradient():
    tensors = {"weights": [1.0], "logprobs": [-20.0], "advantages": [1.0]}
    loss, slopes = OBJECTIVES["importance_sampling"]([0.0], tensors, {})
    assert slopes == [loss] == [-math.exp(20)]


def test_importance_sampling_is_minus_the_weighted_advantages_where_nothing_has_moved():
    tensors = {"weights": [1.0, 0.5], "logprobs": [-1.5, -3.0], "advantages": [2.0, -4.0]}
    assert OBJECTIVES["importance_sampling"]([-1.5, -3.0], tensors, {}) == (0.0, [-2.0, 2.0])
