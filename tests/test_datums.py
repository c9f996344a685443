import json
import math
import random

import pytest

from whitney_loop import rl_datum, sft_datum, tensor


class Scalar:
    """What numpy's and torch's scalars look like from outside: no float, no int."""

    def __init__(self, value):
        self.value = value

    def item(self):
        return self.value

    def __float__(self):
        return float(self.value)


class Array:
    def __init__(self, values):
        self.values = values

    def __iter__(self):
        return (Scalar(value) for value in self.values)

    def tolist(self):
        return self.values


def values(datum, name):
    return datum["loss_inputs"][name]["values"]


def test_a_tensor_says_its_dtype_shape_and_values():
    assert tensor("int64", [5, 6]) == {"dtype": "int64", "shape": [2], "values": [5, 6]}
    assert tensor("float32", [0.5]) == {"dtype": "float32", "shape": [1], "values": [0.5]}


def test_a_tensor_of_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="float16.*int64.*float32"):
        tensor("float16", [1.0])


def test_an_sft_datum_supervises_the_completion_only():
    datum = sft_datum([1, 2, 3], [4, 5])
    assert datum["input"]["token_ids"] == [1, 2, 3, 4]
    assert values(datum, "target_tokens") == [2, 3, 4, 5]
    assert values(datum, "weights") == [0.0, 0.0, 1.0, 1.0]


def test_an_rl_datum_broadcasts_one_advantage_and_pads_the_prompt_with_zeros():
    datum = rl_datum([1, 2], [3, 4], [-0.1, -0.2], 1.5)
    assert values(datum, "weights") == [0.0, 1.0, 1.0]
    assert values(datum, "logprobs") == [0.0, -0.1, -0.2]
    assert values(datum, "advantages") == [0.0, 1.5, 1.5]
    assert set(datum["loss_inputs"]) == {"target_tokens", "weights", "logprobs", "advantages"}


def test_clip_ratios_become_per_token_tensors():
    datum = rl_datum([1, 2], [3], [-0.1], 1.0, clip_low=0.8, clip_high=1.2)
    assert values(datum, "clip_low_threshold") == [0.0, 0.8]
    assert values(datum, "clip_high_threshold") == [0.0, 1.2]
    assert "clip_high_threshold" not in rl_datum([1], [3], [-0.1], 1.0, clip_low=0.0)["loss_inputs"]


def test_every_tensor_is_aligned_with_its_target_for_all_lengths():
    rng = random.Random(1)
    for prompt_length in range(1, 9):
        for completion_length in range(1, 9):
            prompt = [rng.randrange(1000) for _ in range(prompt_length)]
            completion = [rng.randrange(1000) for _ in range(completion_length)]
            logprobs = [-rng.random() for _ in completion]
            advantages = [rng.gauss(0, 1) for _ in completion]
            datum = rl_datum(prompt, completion, logprobs, advantages, clip_low=0.5, clip_high=2)
            length = prompt_length + completion_length - 1
            assert datum["input"]["token_ids"] == (prompt + completion)[:-1]
            assert all(tensor["shape"] == [length] for tensor in datum["loss_inputs"].values())
            assert all(len(tensor["values"]) == length for tensor in datum["loss_inputs"].values())
            rows = zip(
                *(values(datum, name) for name in ("target_tokens", "weights", "logprobs", "advantages")), strict=True
            )
            weighted = [(target, logprob, advantage) for target, weight, logprob, advantage in rows if weight]
            assert weighted == list(zip(completion, logprobs, advantages, strict=True))
            assert sft_datum(prompt, completion)["loss_inputs"]["weights"] == datum["loss_inputs"]["weights"]


def test_a_completion_of_no_tokens_gives_a_datum_without_weight():
    for datum in (sft_datum([1, 2, 3], []), rl_datum([1, 2, 3], [], [], 1.0), rl_datum([1, 2, 3], [], [], [])):
        assert datum["input"]["token_ids"] == [1, 2]
        assert values(datum, "weights") == [0.0, 0.0]


@pytest.mark.parametrize("make", [lambda p, c: sft_datum(p, c), lambda p, c: rl_datum(p, c, [-1.0] * len(c), 1.0)])
def test_an_empty_prompt_and_fewer_than_two_tokens_are_refused(make):
    with pytest.raises(ValueError, match="prompt_tokens is empty"):
        make([], [1, 2])
    with pytest.raises(ValueError, match="at least two"):
        make([1], [])


def test_lengths_that_do_not_match_are_refused_with_both():
    with pytest.raises(ValueError, match="sampled_logprobs has 1 entries.*2 sampled tokens"):
        rl_datum([1], [2, 3], [-1.0], 1.0)
    with pytest.raises(ValueError, match="advantage has 3 entries.*2 sampled tokens"):
        rl_datum([1], [2, 3], [-1.0, -1.0], [1.0, 2.0, 3.0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None, "1.0", 10**400, [1.0]])
def test_a_number_that_is_not_finite_is_refused_with_its_position(bad):
    with pytest.raises(ValueError, match=r"sampled_logprobs\[1\] is "):
        rl_datum([1], [2, 3], [-1.0, bad], 1.0)
    with pytest.raises(ValueError, match=r"advantage\[0\] is "):
        rl_datum([1], [2, 3], [-1.0, -1.0], [bad, 1.0])
    with pytest.raises(ValueError, match=r"values\[0\] is "):
        tensor("float32", [bad])


@pytest.mark.parametrize("bad", [-1, -100, True, 1.5, "7", None])
def test_a_token_that_is_no_id_is_refused_with_its_position(bad):
    with pytest.raises(ValueError, match=r"prompt_tokens\[1\] is .*token id"):
        sft_datum([1, bad], [2])
    with pytest.raises(ValueError, match=r"sampled_tokens\[0\] is .*token id"):
        rl_datum([1], [bad], [-1.0], 1.0)


def test_an_epsilon_taken_for_a_ratio_is_refused():
    with pytest.raises(ValueError, match="clip_high is 0.2.*ratios"):
        rl_datum([1], [2], [-1.0], 1.0, clip_high=0.2)
    with pytest.raises(ValueError, match="clip_low is 1.2.*ratios"):
        rl_datum([1], [2], [-1.0], 1.0, clip_low=1.2)


def test_scalars_and_arrays_of_other_libraries_come_out_as_plain_numbers():
    plain = rl_datum([1, 2], [3, 4], [-0.5, -0.25], [1.0, 2.0], clip_low=0.5)
    assert rl_datum(Array([1, 2]), [Scalar(3), Scalar(4)], Array([-0.5, -0.25]), Array([1.0, 2.0]),
                    clip_low=Scalar(0.5)) == plain  # fmt: skip
    assert rl_datum([1], [2], [Scalar(-0.5)], Scalar(2.0)) == rl_datum([1], [2], [-0.5], 2.0)
    json.dumps(plain, allow_nan=False)


def test_what_is_given_is_not_changed():
    prompt, completion, logprobs = [1, 2], [3], [-1.0]
    rl_datum(prompt, completion, logprobs, 1.0)["input"]["token_ids"].append(9)
    assert (prompt, completion, logprobs) == ([1, 2], [3], [-1.0])
