"""Examples for supervised fine-tuning: how they are read, their order, and their loss."""

import json

import pytest

from loop_runs import check_refused, training_on
from whitney_loop import forward_backward_payload, sft_datum
from whitney_loop.loop import batch_of_step, evaluation_payloads, mean_loss, read_examples, steps_in


def test_a_text_becomes_its_bytes_and_an_end(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n\n{"prompt": [1, 300], "completion": [2]}\n')
    assert read_examples(path, "--data", text=True) == [sft_datum([97], [98, 256]), sft_datum([1, 300], [2])]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_a_file_may_have_a_byte_order_mark_or_be_utf_16(tmp_path, encoding):
    path = tmp_path / "text.jsonl"
    path.write_text('{"prompt": "a", "completion": "ä"}\n' * 2, encoding=encoding)
    assert read_examples(path, "--data", text=True) == [sft_datum([97], [*"ä".encode(), 256])] * 2


def test_a_text_may_hold_line_ends_that_are_not_jsons(tmp_path):
    path = tmp_path / "text.jsonl"
    example = {"prompt": "a\u2028b\x85", "completion": "c"}
    path.write_text(json.dumps(example, ensure_ascii=False) + "\n", encoding="utf-8")
    [datum] = read_examples(path, "--data", text=True)
    assert sum(datum["loss_inputs"]["weights"]["values"]) == 2  # c, and the end


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "bad.jsonl:2: Expecting value"),
        ("[1]", 'bad.jsonl:2: expected {"prompt": …, "completion": …}'),
        ('{"prompt": "a"}', "bad.jsonl:2: expected"),
        ('{"prompt": "", "completion": "b"}', "bad.jsonl:2: prompt_tokens is empty"),
        ('{"prompt": [1], "completion": [2.5]}', "bad.jsonl:2: completion_tokens[0] is 2.5"),
        ('{"prompt": 1, "completion": [2]}', "bad.jsonl:2: prompt is a int"),
        ('{"prompt": [1, 2], "completion": []}', "bad.jsonl:2: completion is empty"),
        ('{"prompt": [1, 2], "completion": [9223372036854775808]}', "bad.jsonl:2: completion_tokens[0] is"),
        (b'{"prompt": "\xff", "completion": "b"}', "bad.jsonl:2: 'utf-8' codec"),
        ("[" * 100_000, "bad.jsonl:2: "),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(run_loop, tmp_path, line, message):
    raw = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "bad.jsonl").write_bytes(b'{"prompt": "a", "completion": "b"}\n' + raw + b"\n")
    for script, option in (("sft_loop", "--data"), ("distillation_loop", "--teacher-data")):
        done = run_loop(script, option, "bad.jsonl")
        check_refused(done, message)


def test_text_is_refused_away_from_the_embedded_service(run_loop, tmp_path, remote):
    (tmp_path / "text.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    done = run_loop("sft_loop", "--data", "text.jsonl", "--model", "m", **training_on(remote))
    assert done.returncode == 2 and "text.jsonl:1: prompt is text, which only the embedded" in done.stderr
    assert "tokenize it first" in done.stderr


def test_each_epoch_has_all_data_in_its_own_order():
    data = [sft_datum([1], [token]) for token in range(10)]

    def batches(seed):
        return [batch_of_step(data, 4, seed, step, "modal") for step in range(steps_in(data, 2, 4))]

    assert [epoch for epoch, _ in batches(1)] == [0, 0, 0, 1, 1, 1]
    orders = [[datum for epoch, payload in batches(1) if epoch == e for datum in payload["data"]] for e in (0, 1)]
    assert orders[0] != orders[1] and all(sorted(order, key=str) == sorted(data, key=str) for order in orders)
    assert batches(1) != batches(2)


def test_an_evaluation_has_all_data_in_their_order():
    data = [sft_datum([1], [token]) for token in range(5)]
    payloads = list(evaluation_payloads(data, 2, "tinker"))
    assert [len(payload["data"]) for payload in payloads] == [2, 2, 1]
    assert [datum for payload in payloads for datum in payload["data"]] == data


@pytest.mark.parametrize("outputs", [None, [], [None], [{}], [{"logprobs": [-1.0]}], [{"logprobs": [-1.0, None]}]])
def test_a_loss_per_token_needs_outputs_that_fit(outputs):
    payload = forward_backward_payload([sft_datum([1, 2], [3])], "cross_entropy")
    assert mean_loss([payload], [{"outputs": outputs}]) is None
    assert mean_loss([payload], [{"outputs": [{"logprobs": [None, -2.0]}]}]) == 2.0
