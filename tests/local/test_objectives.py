"""The losses against MATH's reference vectors and against differences; and masked tokens leak nothing."""

from __future__ import annotations

import math
import random

import pytest

from whitney_loop.local.objectives import CLIPPING, LOG_RATIO_LIMIT, OBJECTIVES, evaluate, provider_defaults

INFINITY, NAN = math.inf, math.nan
POLICY_LOSSES = sorted(OBJECTIVES.keys() - {"cross_entropy", "ppo_critic"})
WITH_CLIP_RANGE = ["cispo", "gspo", "ppo"]

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
V3 = (
    [0.5, 1.0, -0.2],
    {"values": [0.4, 0.2, 0.3], "returns": [1.0, 1.0, 0.5], "weights": [1.0, 1.0, 1.0]},
)
REFERENCES = [
    ("cross_entropy", V1, 3.5, [-1, -1, -1]),
    ("importance_sampling", V1, -1.434464, [-1.221403, 1, -1.213061]),
    ("ppo", V1, -1.413061, [0, 1, -1.213061]),
    ("cispo", V1, 3.9, [-1.2, 1, -1.6]),
    ("dro", V1, 4.50725, [-0.99, 1, -2.025]),
    ("gspo", V1, -1.809675, [-0.904837, 0.904837, -1.809675]),
    ("dppo", V1, -1.434464, [-1.221403, 1, -1.213061]),
    ("cross_entropy", V2, 1.85, [0, -1, -1, -0.5, -1]),
    ("importance_sampling", V2, -6.140169, [0, -6.0828, 1.229802, 0.122456, -1.409627]),
    ("ppo", V2, -0.610198, [0, 0, 1.229802, 0, 0]),
    ("cispo", V2, -1.832, [0, -1.8, 0.6, 0.8, -0.84]),
    ("dro", V2, -2.223375, [0, -1.43, 0.545, 0.9475, -0.665]),
    ("gspo", V2, -0.761516, [0, 0, 0.626161, 1.252323, 0]),
    ("dppo", V2, 1.229802, [0, 0, 1.229802, 0, 0]),
    ("ppo_critic", V3, 0.55, [-0.5, 0, -0.7]),
]
V3_CONFIG = {"value_clip": 0.2}


@pytest.mark.parametrize(("name", "vector", "loss", "slopes"), REFERENCES)
def test_value_and_gradient_are_those_of_the_reference_vectors(name, vector, loss, slopes):
    found = evaluate(name, *vector, V3_CONFIG if vector is V3 else {})
    assert found.loss == pytest.approx(loss, abs=1e-6)
    assert found.slopes == pytest.approx(slopes, abs=1e-6)


def test_every_loss_has_a_reference_vector():
    assert {name for name, *_ in REFERENCES} == OBJECTIVES.keys()


# Differences


def clamp(x, low, high):
    return max(low, min(x, high))


def exp(log_ratio):
    return math.exp(clamp(log_ratio, -20.0, 20.0))


def formula(name, p, sg_p, tensors, config):
    """Return each token's term without w, by MATH's table; ``sg_p`` is its sg(p)."""
    if name == "cross_entropy":
        return [-x for x in p]
    if name == "ppo_critic":
        terms = []
        for v, old, target in zip(p, tensors["values"], tensors["returns"], strict=True):
            clipped = old + clamp(v - old, -config["value_clip"], config["value_clip"]) if config else v
            terms.append(0.5 * max((clipped - target) ** 2, (v - target) ** 2))
        return terms
    q, advantages, n = tensors["logprobs"], tensors["advantages"], len(p)
    lows = tensors.get("clip_low_threshold", [config.get("clip_low_threshold", 0.8)] * n)
    highs = tensors.get("clip_high_threshold", [config.get("clip_high_threshold", 1.2)] * n)
    counted = [t for t in range(n) if tensors["weights"][t] != 0]
    mean = sum(sg_p[t] - q[t] for t in counted) / len(counted)
    terms = []
    for x, sg_x, y, a, low, high in zip(p, sg_p, q, advantages, lows, highs, strict=True):
        # Beyond the limit the ratio is constant, so gspo's exp(p − sg(p)) must be constant there too.
        token_ratio = exp(mean) * (math.exp(x - sg_x) if abs(mean) <= 20 else 1.0)
        rose, fell = (sign * (math.exp(sg_x) - math.exp(y)) for sign in (1, -1))
        masked = (a > 0 and rose > config.get("delta_high", 0.2)) or (a < 0 and fell > config.get("delta_low", 0.2))
        by_name = {
            "importance_sampling": -exp(x - y) * a,
            "ppo": -min(exp(x - y) * a, clamp(exp(x - y), low, high) * a),
            "cispo": -clamp(exp(sg_x - y), low, high) * x * a,
            "gspo": -min(token_ratio * a, clamp(token_ratio, low, high) * a),
            "dro": -(x * a - 0.5 * config.get("beta", 0.05) * (x - y) ** 2),
            "dppo": 0.0 if masked else -exp(x - y) * a,
        }
        terms.append(by_name[name])
    return terms


GAPS = {
    "small": [(-0.15, 0.15)],
    "clipped above": [(0.3, 1.5)],
    "clipped below": [(-1.5, -0.35)],
    "beyond the limit": [(20.1, 40.0)],
    "beyond the limit below": [(-40.0, -20.1)],
    "mixed": [(-0.15, 0.15), (0.3, 1.5), (-1.5, -0.35), (5.0, 19.9), (20.1, 40.0), (-40.0, -20.1)],
}
CONFIGS = {
    "ppo": {"clip_low_threshold": 0.5, "clip_high_threshold": 2.5},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "gspo": {"clip_low_threshold": 0.97, "clip_high_threshold": 1.02},
    "dro": {"beta": 0.7},
    "dppo": {"delta_low": 0.05, "delta_high": 0.4},
    "ppo_critic": {"value_clip": 0.3},
}
CASES = [(name, config) for name in sorted(OBJECTIVES) for config in ({}, CONFIGS.get(name)) if config is not None]


def random_datum(rng, gaps, n=12):
    """Return p below 0, or v, near the old one, with masked positions and fractional weights, one of them negative."""
    x = [-rng.expovariate(0.5) for _ in range(n)]
    old = [now - rng.uniform(*rng.choice(gaps)) for now in x]
    x = [now + min(0.0, -before) for now, before in zip(x, old, strict=True)]  # both are logprobs
    old = [min(before, 0.0) for before in old]
    return x, {
        "logprobs": old,
        "values": old,
        "advantages": [rng.gauss(0, 1) for _ in range(n)],
        "returns": [rng.gauss(0, 1) for _ in range(n)],
        "weights": [*(rng.choice([0.0, 0.3, 1.0, 1.7]) for _ in range(n - 2)), 0.0, -0.6],
    }


def assert_value_and_gradient_are_those_of_the_formula(name, x, tensors, config):
    found = evaluate(name, x, tensors, config)
    weighted = [w * term for w, term in zip(tensors["weights"], formula(name, x, x, tensors, config), strict=True)]
    assert found.loss == pytest.approx(sum(weighted), rel=1e-12, abs=1e-12)
    step = 1e-6
    above, below = (formula(name, [v + sign * step for v in x], x, tensors, config) for sign in (1, -1))
    for t, w in enumerate(tensors["weights"]):
        # Term by term: in a sum with a ratio of 5e8 the differences of the others would be lost.
        difference = w * (above[t] - below[t]) / (2 * step)
        assert found.slopes[t] == pytest.approx(difference, rel=1e-6, abs=1e-7), t


@pytest.mark.parametrize("gaps", GAPS)
@pytest.mark.parametrize(("name", "config"), CASES)
def test_the_gradient_is_that_of_the_formula_by_central_differences(name, config, gaps):
    for seed in range(5):
        rng = random.Random(f"differences of {name} {gaps} {seed}")
        assert_value_and_gradient_are_those_of_the_formula(name, *random_datum(rng, GAPS[gaps]), config)


@pytest.mark.parametrize("name", WITH_CLIP_RANGE)
def test_the_gradient_is_that_of_the_formula_where_each_token_has_its_own_clip_range(name):
    for seed in range(10):
        rng = random.Random(f"clip tensors of {name} {seed}")
        p, tensors = random_datum(rng, GAPS["small"] + GAPS["clipped above"] + GAPS["clipped below"])
        tensors["clip_low_threshold"] = [rng.uniform(0.3, 1.0) for _ in p]
        tensors["clip_high_threshold"] = [rng.uniform(1.0, 3.0) for _ in p]
        assert_value_and_gradient_are_those_of_the_formula(name, p, tensors, {})


# Clipping


@pytest.mark.parametrize("name", WITH_CLIP_RANGE)
@pytest.mark.parametrize("range_", [{"low": 0.9}, {"high": 1.05}, {"low": 0.5, "high": 2.0}, {"low": 1.0, "high": 1.0}])
def test_clip_tensors_and_config_keys_lead_to_the_same_numbers(name, range_):
    config = {f"clip_{side}_threshold": threshold for side, threshold in range_.items()}
    for p, tensors in (V1, V2):
        clips = {key: [threshold] * len(p) for key, threshold in config.items()}
        assert evaluate(name, p, tensors | clips, {}) == evaluate(name, p, tensors, config)


@pytest.mark.parametrize("name", WITH_CLIP_RANGE)
def test_the_default_thresholds_are_four_and_six_fifths(name):
    config = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    assert evaluate(name, *V2, config) == evaluate(name, *V2, {})


def test_cispo_has_a_wider_default_range_on_tinker():
    """The ratios of V2 that count are e^1.4 = 4.06, e^0.9, e^-2.1 and e^0.7: one of them is above 4."""
    wide = {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
    assert provider_defaults("tinker", "cispo") == wide
    assert evaluate("cispo", *V2, provider_defaults("tinker", "cispo")).clipped == 1
    assert evaluate("cispo", *V2, provider_defaults("modal", "cispo")) == evaluate("cispo", *V2, {})
    assert all(provider_defaults("tinker", name) == {} for name in OBJECTIVES if name != "cispo")


def test_the_other_defaults_are_those_of_the_table():
    assert evaluate("dro", *V2, {"beta": 0.05}) == evaluate("dro", *V2, {})
    assert evaluate("dppo", *V2, {"delta_low": 0.2, "delta_high": 0.2}) == evaluate("dppo", *V2, {})
    assert evaluate("ppo_critic", *V3, {"value_clip": 1e9}) == evaluate("ppo_critic", *V3, {})


@pytest.mark.parametrize(
    ("name", "vector", "clipped"),
    [
        ("ppo", V1, 1),
        ("cispo", V1, 2),
        ("gspo", V1, 0),
        ("dppo", V1, 0),
        ("ppo", V2, 3),
        ("cispo", V2, 4),
        ("gspo", V2, 2),
        ("dppo", V2, 3),
        ("ppo_critic", V3, 1),
        ("cross_entropy", V2, 0),
        ("importance_sampling", V2, 0),
        ("dro", V2, 0),
    ],
)
def test_the_tokens_whose_clip_acted_are_counted_among_those_that_count(name, vector, clipped):
    found = evaluate(name, *vector, V3_CONFIG if vector is V3 else {})
    assert (found.clipped, found.counted) == (clipped, 4 if vector is V2 else 3)
    assert clipped == 0 or name in CLIPPING


@pytest.mark.parametrize("name", ["gspo", "ppo"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_on_its_threshold_is_not_clipped_and_keeps_its_gradient(name, advantage):
    for log_ratio, side in ((0.25, "high"), (-0.25, "low")):
        tensors = {"weights": [1.0], "logprobs": [-1.0 - log_ratio], "advantages": [advantage]}
        r = math.exp(-1.0 - (-1.0 - log_ratio))
        found = evaluate(name, [-1.0], tensors, {f"clip_{side}_threshold": r})
        assert found == (-r * advantage, [-r * advantage], 0, 1)


def test_an_advantage_of_zero_is_a_tie():
    for name in ("gspo", "ppo"):
        tensors = {"weights": [1.0], "logprobs": [-3.0], "advantages": [0.0]}
        assert evaluate(name, [-1.0], tensors, {}) == (0.0, [0.0], 0, 1)


def test_a_value_within_its_clip_is_never_clipped_by_rounding():
    """v_old + (v − v_old) is often another number than v; that must not cost the gradient."""
    rng = random.Random("rounding")
    for _ in range(2000):
        old, target = rng.uniform(-3, 3), rng.uniform(-3, 3)
        v = old + rng.uniform(-0.19, 0.19)
        tensors = {"weights": [1.0], "values": [old], "returns": [target]}
        found = evaluate("ppo_critic", [v], tensors, {"value_clip": 0.2})
        assert found.slopes == [v - target]
        assert found.clipped == 0


def test_the_token_form_of_gspo_gives_every_token_the_sequences_ratio():
    p, tensors = V1
    s = math.exp((0.2 + 0.0 - 0.5) / 3)
    assert evaluate("gspo", p, tensors, {}).slopes == pytest.approx([-s * a for a in tensors["advantages"]])


def test_gspo_limits_the_mean_and_not_its_terms():
    tensors = {"weights": [1.0, 1.0], "logprobs": [-60.0, -1.0], "advantages": [1.0, 1.0]}
    wide = {"clip_low_threshold": 0.0, "clip_high_threshold": 1e30}
    inside = evaluate("gspo", [-1.0, -25.0], tensors, wide)  # log-ratios 59 and −24
    assert inside.slopes == pytest.approx([-math.exp(17.5)] * 2)
    beyond = evaluate("gspo", [-1.0, -1.0], tensors, wide)
    assert beyond.loss == pytest.approx(-2 * math.exp(20))
    assert beyond.slopes == [0.0, 0.0]


@pytest.mark.parametrize("name", ["dppo", "importance_sampling", "ppo"])
@pytest.mark.parametrize(("sign", "log_ratio"), [(1, 20.5), (1, 800.0), (-1, -20.5), (-1, -800.0)])
def test_a_ratio_beyond_the_limit_is_cut_and_has_no_gradient(name, sign, log_ratio):
    tensors = {"weights": [1.0], "logprobs": [-900.0], "advantages": [2.0]}
    wide = {"clip_low_threshold": 0.0, "clip_high_threshold": 1e30}
    found = evaluate(name, [-900.0 + log_ratio], tensors, wide)
    assert found.loss == pytest.approx(-2 * math.exp(sign * LOG_RATIO_LIMIT))
    assert found.slopes == [0.0]


def test_a_ratio_at_the_limit_still_has_its_gradient():
    tensors = {"weights": [1.0], "logprobs": [-20.0], "advantages": [1.0]}
    found = evaluate("importance_sampling", [0.0], tensors, {})
    assert found.slopes == [found.loss] == [-math.exp(20)]


def test_cispo_keeps_the_gradient_of_every_token_however_far_its_ratio_is():
    tensors = {"weights": [1.0, 1.0], "logprobs": [-60.0, 0.0], "advantages": [2.0, 2.0]}
    assert evaluate("cispo", [-1.0, -60.0], tensors, {}).slopes == [-1.2 * 2, -0.8 * 2]


# Not finite, or masked


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
@pytest.mark.parametrize("garbage", [NAN, INFINITY, -INFINITY])
def test_nothing_leaks_from_a_masked_position(name, garbage):
    weights = [1.0, 0.0, 0.5]
    clean = {"logprobs": [-1.0, -1.0, -2.0], "advantages": [1.0, 1.0, -1.0]}
    clean |= {"values": [-1.0, -1.0, -2.0], "returns": [1.0, 1.0, -1.0]}
    clean |= {"clip_low_threshold": [0.9, 0.9, 0.9], "clip_high_threshold": [1.1, 1.1, 1.1]}
    dirty = {key: [first, garbage, last] for key, (first, _, last) in clean.items()}
    x = [-1.2, -0.3, -2.2]
    expected = evaluate(name, x, clean | {"weights": weights}, CONFIGS.get(name, {}))
    assert math.isfinite(expected.loss)
    found = evaluate(name, [-1.2, garbage, -2.2], dirty | {"weights": weights}, CONFIGS.get(name, {}))
    assert found == expected
    assert found.slopes[1] == 0.0
    assert found.counted == 2


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_a_datum_that_is_masked_completely_is_exactly_zero(name):
    tensors = {"weights": [0.0, 0.0], "logprobs": [NAN, -1.0], "advantages": [1.0, INFINITY]}
    tensors |= {"values": [NAN, -1.0], "returns": [1.0, INFINITY]}
    assert evaluate(name, [-1.0, -2.0], tensors, {}) == (0.0, [0.0, 0.0], 0, 0)


@pytest.mark.parametrize(("name", "config"), CASES)
def test_a_nan_at_a_position_that_counts_makes_the_loss_nan(name, config):
    clean = {"logprobs": -1.0, "advantages": 1.0} if name in POLICY_LOSSES else {}
    clean = {"values": -1.0, "returns": 1.0} if name == "ppo_critic" else clean
    for broken in ("p", *clean):
        numbers = {"p": -1.1} | clean | {broken: NAN}
        tensors = {"weights": [1.0]} | {key: [number] for key, number in numbers.items() if key != "p"}
        assert math.isnan(evaluate(name, [numbers["p"]], tensors, config).loss), broken


@pytest.mark.parametrize(("name", "config"), CASES)
@pytest.mark.parametrize("huge", [3e38, -3e38, 1e300])
def test_huge_numbers_raise_nothing(name, config, huge):
    """A logprob of 3e38 is nonsense but raises nothing: the engine judges the loss."""
    keys = ("logprobs", "advantages", "values", "returns", "weights")
    for broken in keys:
        tensors = {key: [huge if key == broken else 1.0] for key in keys}
        assert isinstance(evaluate(name, [-1.0], tensors, config).loss, float)


# Identities


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_all_policy_losses_have_the_same_gradient_where_nothing_has_moved(name):
    tensors = {"weights": [1.0, 0.5], "logprobs": [-1.5, -3.0], "advantages": [2.0, -4.0]}
    found = evaluate(name, [-1.5, -3.0], tensors, {})
    assert found.slopes == [-2.0, 2.0]
    assert found.loss == (-3.0 if name in ("cispo", "dro") else 0.0)
    assert found.clipped == 0


def test_a_critics_datum_without_values_and_returns_has_no_terms():
    assert evaluate("ppo_critic", [0.5, 1.0], {"weights": [1.0, 1.0]}, {"value_clip": 0.2}) == (0.0, [0.0, 0.0], 0, 0)
