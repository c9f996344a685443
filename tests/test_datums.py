import enum
import json
import math
import random

import pytest

from whitney_loop import (
    completion_logprobs,
    completion_values,
    critic_datum,
    rl_datum,
    sft_datum,
    tensor,
    trajectory_datum,
)


class Scalar:
    """Like a scalar of numpy or torch: neither a float nor an int."""

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


class PlainNoFloat(float):
    """Like numpy.float64: a float to isinstance, but json may print it otherwise."""


@pytest.mark.parametrize("given", [[1, True, 0.5], [PlainNoFloat(0.5)], [1.7e308, 1.7e308], [], (0.5, 1), range(3)])
def test_any_finite_numbers_become_plain_floats(given):
    found = tensor("float32", given)["values"]
    assert found == list(given) and all(type(number) is float for number in found)


class Id(enum.IntEnum):
    END = 256


@pytest.mark.parametrize("given", [b"ab", range(3), [Id.END], (2**63 - 1, 0), []])
def test_any_integers_become_plain_token_ids(given):
    found = tensor("int64", given)["values"]
    assert found == list(given) and all(type(token) is int for token in found)


@pytest.mark.parametrize("bad", [math.nan, math.inf, None, True, -1, 2**63])
def test_the_position_of_a_bad_entry_among_many_good_ones_is_named(bad):
    for position in (0, 500, 999):
        tokens, numbers = [1] * 1000, [0.5] * 1000
        tokens[position] = bad
        with pytest.raises(ValueError, match=rf"values\[{position}\] is .*token id"):
            tensor("int64", tokens)
        if not isinstance(bad, int):
            numbers[position] = bad
            with pytest.raises(ValueError, match=rf"values\[{position}\] is .*finite number"):
                tensor("float32", numbers)


def test_infinities_that_cancel_in_a_sum_are_refused():
    with pytest.raises(ValueError, match=r"values\[1\] is inf"):
        tensor("float32", [0.0, math.inf, -math.inf])


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


@pytest.mark.parametrize("bad", [-1, -100, True, 1.5, "7", None, 2**63])
def test_a_token_that_is_no_id_is_refused_with_its_position(bad):
    with pytest.raises(ValueError, match=r"prompt_tokens\[1\] is .*token id"):
        sft_datum([1, bad], [2])
    with pytest.raises(ValueError, match=r"sampled_tokens\[0\] is .*token id"):
        rl_datum([1], [bad], [-1.0], 1.0)


def test_a_positive_logprob_is_refused_by_name_unless_it_is_rounding():
    rl_datum([1], [2, 3], [1e-3, -1.0], 1.0)
    flipped = "but a logprob is at most 0: is its sign flipped"
    with pytest.raises(ValueError, match=rf"sampled_logprobs\[1\] is 0.7, {flipped}"):
        rl_datum([1], [2, 3], [-1.0, 0.7], 1.0)
    with pytest.raises(ValueError, match=rf"spans\[1\].logprobs\[0\] is 0.7, {flipped}"):
        trajectory_datum([([1], None), ([2], [0.7])], 1.0)
    with pytest.raises(ValueError, match=rf"result.logprobs\[3\] is 0.7, {flipped}"):
        completion_logprobs({"logprobs": [None, -0.2, -0.1, 0.7]}, [1, 2])


def test_an_epsilon_taken_for_a_ratio_is_refused():
    with pytest.raises(ValueError, match="clip_high is 0.2.*ratios"):
        rl_datum([1], [2], [-1.0], 1.0, clip_high=0.2)
    for low in (1.2, -0.2):
        with pytest.raises(ValueError, match=f"clip_low is {low}.*ratios"):
            rl_datum([1], [2], [-1.0], 1.0, clip_low=low)


def test_scalars_and_arrays_of_other_libraries_come_out_as_plain_numbers():
    plain = rl_datum([1, 2], [3, 4], [-0.5, -0.25], [1.0, 2.0], clip_low=0.5)
    assert rl_datum(Array([1, 2]), [Scalar(3), Scalar(4)], Array([-0.5, -0.25]), Array([1.0, 2.0]),
                    clip_low=Scalar(0.5)) == plain  # fmt: skip
    assert rl_datum([1], [2], [Scalar(-0.5)], Scalar(2.0)) == rl_datum([1], [2], [-0.5], 2.0)
    json.dumps(plain, allow_nan=False)


def test_arguments_are_not_changed():
    prompt, completion, logprobs = [1, 2], [3], [-1.0]
    rl_datum(prompt, completion, logprobs, 1.0)["input"]["token_ids"].append(9)
    assert (prompt, completion, logprobs) == ([1, 2], [3], [-1.0])


def test_a_trajectory_of_one_span_is_an_rl_datum():
    rng = random.Random(3)
    for length in range(6):
        prompt = [rng.randrange(99) for _ in range(rng.randrange(2, 5))]
        completion = [rng.randrange(99) for _ in range(length)]
        logprobs = [-rng.random() for _ in completion]
        advantages = [rng.gauss(0, 1) for _ in completion]
        spans = [(prompt, None), (completion, logprobs)]
        assert trajectory_datum(spans, 0.5) == rl_datum(prompt, completion, logprobs, 0.5)
        for clip in ({}, {"clip_low": 0.8, "clip_high": 1.28}):
            assert trajectory_datum(spans, advantages, **clip) == rl_datum(
                prompt, completion, logprobs, advantages, **clip
            )


def test_only_sampled_tokens_of_a_trajectory_carry_weight_logprob_and_advantage():
    spans = [([1, 2], None), ([3, 4], [-0.3, -0.4]), ([5], None), ([6], [-0.6]), ([7, 8], None)]
    datum = trajectory_datum(spans, [1.0, 2.0, 3.0], clip_high=1.2)
    assert datum["input"]["token_ids"] == [1, 2, 3, 4, 5, 6, 7]
    assert values(datum, "target_tokens") == [2, 3, 4, 5, 6, 7, 8]
    assert values(datum, "weights") == [0, 1, 1, 0, 1, 0, 0]
    assert values(datum, "logprobs") == [0, -0.3, -0.4, 0, -0.6, 0, 0]
    assert values(datum, "advantages") == [0, 1.0, 2.0, 0, 3.0, 0, 0]
    assert values(datum, "clip_high_threshold") == [0, 1.2, 1.2, 0, 1.2, 0, 0]


def test_an_invalid_trajectory_is_refused_with_the_span():
    for spans in ([], [([], None)], [([1, 2], [-1.0, -1.0])]):
        with pytest.raises(ValueError, match="must be an observation"):
            trajectory_datum(spans, 1.0)
    with pytest.raises(ValueError, match=r"spans\[1\].logprobs has 1 entries.*2 sampled tokens"):
        trajectory_datum([([1], None), ([2, 3], [-1.0])], 1.0)
    with pytest.raises(ValueError, match=r"spans\[1\].tokens\[0\] is -1"):
        trajectory_datum([([1], None), ([-1], [-1.0])], 1.0)
    for spans, found in (
        (None, "spans is None"),
        ([([1, 2],)], r"spans\[0\] is"),
        ([[1, 2, 3], [3]], r"spans\[0\] is"),
    ):
        with pytest.raises(ValueError, match=found):
            trajectory_datum(spans, 1.0)
    with pytest.raises(ValueError, match="one token in all"):
        trajectory_datum([([1], None), ([], [])], 1.0)
    with pytest.raises(ValueError, match="advantage has 1 entries.*2 sampled tokens"):
        trajectory_datum([([1], None), ([2, 3], [-1.0, -1.0])], [1.0])


def test_a_critic_datum_has_values_and_returns_where_the_policy_chose():
    datum = critic_datum([1, 2], [3, 4], [0.1, 0.2], [1.0, 2.0])
    assert datum["input"]["token_ids"] == [1, 2, 3]
    assert values(datum, "weights") == [0, 1, 1]
    assert values(datum, "values") == [0, 0.1, 0.2]
    assert values(datum, "returns") == [0, 1.0, 2.0]
    with pytest.raises(ValueError, match="values has 1 entries.*2 sampled tokens"):
        critic_datum([1, 2], [3, 4], [0.1], [1.0, 2.0])
    with pytest.raises(ValueError, match="returns.1. is nan"):
        critic_datum([1, 2], [3, 4], [0.1, 0.2], [1.0, math.nan])


def test_the_completions_part_of_a_result_is_cut_at_the_prompt():
    assert completion_logprobs({"logprobs": [None, -0.2, -0.3, -0.4]}, [1, 2]) == [-0.3, -0.4]
    assert completion_logprobs({"logprobs": [None, -0.2]}, [1, 2]) == []
    assert completion_values({"values": [0.1, 0.2, 0.3]}, [1, 2]) == [0.2, 0.3]
    assert completion_logprobs({"logprobs": Array([None, -0.2, -0.3])}, [1, 2]) == [-0.3]
    for nothing in ({}, None, []):
        with pytest.raises(ValueError, match="result.logprobs is None, expected a list of at least 2"):
            completion_logprobs(nothing, [1, 2])
    with pytest.raises(ValueError, match="result.logprobs is .* at least 3"):
        completion_logprobs({"logprobs": [None, -0.2]}, [1, 2, 3])
    with pytest.raises(ValueError, match=r"result.logprobs\[2\] is None"):
        completion_logprobs({"logprobs": [None, -0.2, None]}, [1, 2])


def test_a_text_in_place_of_token_ids_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match="prompt_tokens is the text 'hello', expected a sequence of numbers: tokenize"):
        rl_datum("hello", [1], [-1.0], 0.5)
