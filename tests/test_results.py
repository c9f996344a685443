"""Results: a sample that can be trained on, and the sampler of a save."""

import pytest

from whitney_loop import UnexpectedResponse, result_sampler_id, result_sequences

SEQUENCE = {"tokens": [1, 2], "logprobs": [-0.1, -0.2], "stop_reason": "stop"}


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "result.sequences is None"),
        ({"sequences": []}, "result.sequences is \\[\\]"),
        ({"sequences": [SEQUENCE, "x"]}, r"result.sequences\[1\] is 'x'"),
        ({"sequences": [SEQUENCE | {"tokens": ["1", "2"]}]}, r"sequences\[0\].tokens is .*token ids"),
        ({"sequences": [SEQUENCE | {"tokens": None}]}, r"sequences\[0\].tokens is None"),
        ({"sequences": [SEQUENCE | {"logprobs": None}]}, r"sequences\[0\].logprobs is None"),
        ({"sequences": [SEQUENCE | {"logprobs": [-0.1, None]}]}, r"sequences\[0\].logprobs\[1\] is None"),
        ({"sequences": [SEQUENCE | {"logprobs": [-0.1, float("nan")]}]}, r"sequences\[0\].logprobs\[1\] is nan"),
        ({"sequences": [SEQUENCE | {"tokens": [1, True]}]}, r"sequences\[0\].tokens is .*token ids"),
        (
            {"sequences": [SEQUENCE | {"logprobs": [-0.1]}]},
            r"logprobs is \[-0.1\], expected 2 .*, not 1",
        ),
        ({"sequences": [{"tokens": [1, 2]}]}, r"sequences\[0\].logprobs is None"),
    ],
)
def test_a_sample_that_cannot_be_trained_on_is_refused_with_the_field(result, message):
    with pytest.raises(UnexpectedResponse, match=message):
        result_sequences(result)


def test_a_sample_that_can_be_trained_on_gives_its_sequences():
    sequences = [SEQUENCE, {"tokens": [], "logprobs": []}, SEQUENCE | {"logprobs": [0, -1]}]
    assert result_sequences({"sequences": sequences}) == sequences


def test_a_save_without_a_sampler_id_is_reported():
    assert result_sampler_id({"sampler_id": "smp-1"}) == "smp-1"
    with pytest.raises(UnexpectedResponse, match="result.sampler_id is None"):
        result_sampler_id({})
