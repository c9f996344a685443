"""Sampled texts: three of a cycle on stderr, and all in the file of --samples, which resumes exactly."""

import re

import pytest

from loop_runs import GRPO, check_refused, entries_of, training_on, write_requests
from whitney_loop.loop.files import lock
from whitney_loop.loop.report import cut

COMMON = ("--sample-json", "prompts.jsonl", "--lora-rank", "1", "--batch-size", "2", "--learning-rate", "0.1")
COMMON += ("--seed", "1")
RESUME = ("--resume-from", "state-1", "--first-cycle", "1", "--seed", "1")
MINE = """
from grpo_build_loss import build_loss

def decode(tokens):
    return f"mine of {len(tokens)} \\x1b[2J\\n"
"""
RAISES = """
from grpo_build_loss import build_loss

def decode(tokens):
    raise LookupError("no such token")
"""
WITHOUT_REWARDS = """
import grpo_build_loss

def build_loss(sample, cycle, request, ctx):
    sample["sequences"].reverse()
    payload = grpo_build_loss.build_loss(sample, cycle, request, ctx)
    ctx.metrics.clear()
    return payload
"""


ASKS_ONLY = """
from grpo_build_loss import reward
from whitney_loop import group_mean_advantages, policy_payload

def build_loss(sample, cycle, request, ctx):
    rewards = [ctx.reward(sequence, request) for sequence in sample["sequences"]]
    return policy_payload(sample, request, group_mean_advantages(rewards), "importance_sampling", provider=ctx.provider)
"""


@pytest.fixture
def train(run_loop, tmp_path):
    for name, text in (
        ("mine", MINE),
        ("raises", RAISES),
        ("without_rewards", WITHOUT_REWARDS),
        ("asks_only", ASKS_ONLY),
    ):
        (tmp_path / f"{name}.py").write_text(text)
    write_requests(tmp_path / "prompts.jsonl", ["the ", "she ", "they ", "one "])

    def run(*arguments, build_loss=GRPO, **variables):
        done = run_loop("rl_loop", "--build-loss", build_loss, *COMMON, *arguments, **variables)
        assert done.returncode == 0, done.stderr
        return done

    return run


def texts_shown(stderr):
    """Return (cycle, name, value, text) of each text on stderr."""
    shown = []
    for line in stderr.splitlines():
        if match := re.match(r"cycle (\d+) ", line):
            cycle = int(match[1])
        if match := re.match(r"  (best|median|worst|sample) +(\S*) +(.*)", line):
            shown.append((cycle, match[1], float(match[2] or "nan"), match[3]))
    return shown


# On stderr


def test_texts_are_shown_at_the_first_cycle_at_the_last_and_at_every_nth(train):
    assert {cycle for cycle, *_ in texts_shown(train("--cycles", "6").stderr)} == {0, 5}
    shown = texts_shown(train("--cycles", "6", "--show-every", "2").stderr)
    assert [cycle for cycle, *_ in shown] == [0, 0, 0, 2, 2, 2, 4, 4, 4, 5, 5, 5]
    assert [name for _, name, *_ in shown[:3]] == ["best", "median", "worst"]
    rewards = [value for _, _, value, _ in shown[:3]]
    assert rewards == sorted(rewards, reverse=True) and rewards[0] > rewards[-1]
    assert all(re.match(r"(the|she|they|one)  → ", text) for *_, text in shown)


def test_the_users_decode_comes_first_and_its_control_characters_are_visible(train):
    shown = train(build_loss="mine:build_loss").stderr
    assert r"mine of 4 \x1b[2J\n → mine of 6 \x1b[2J\n" in shown and "\x1b" not in shown


def test_token_ids_are_shown_if_there_is_no_decode(train, remote, tmp_path):
    remote_run = ("--model", "byte-lm", "--samples", "s.jsonl")
    done = train(*remote_run, **training_on(remote))
    assert all(re.fullmatch(r"[\d ]+ → [\d ]*", text) for *_, text in texts_shown(done.stderr))
    assert all(line["text"] is None and line["prompt_text"] is None for line in entries_of(tmp_path / "s.jsonl"))


def test_a_decode_that_raises_is_told_once_and_the_training_goes_on(train):
    done = train("--samples", "s.jsonl", build_loss="raises:build_loss")
    assert done.stderr.count("decode raised LookupError: no such token") == 1 and "decode" in done.summary["warnings"]
    assert all(re.match(r"[\d ]+ → ", text) for *_, text in texts_shown(done.stderr))


def test_advantages_decide_the_best_text_if_there_are_no_rewards(train, tmp_path):
    done = train("--samples", "s.jsonl", "--cycles", "1", build_loss="without_rewards:build_loss")
    lines = entries_of(tmp_path / "s.jsonl")
    assert {line["reward"] for line in lines} == {None}
    [best, *_] = texts_shown(done.stderr)
    assert best[2] == pytest.approx(max(line["advantage"] for line in lines), rel=1e-3)


@pytest.mark.parametrize(
    ("text", "columns", "expected"),
    [
        ("abc", 3, "abc"),
        ("abcd", 3, "ab…"),
        ("a\nb", 3, "a\\…"),
        ("漢字", 4, "漢字"),
        ("漢字", 3, "漢…"),
        ("a" * 10**6, 4, "aaa…"),
        ("", 4, ""),
    ],
)
def test_a_text_is_cut_to_the_columns_of_a_terminal(text, columns, expected):
    assert cut(text, columns) == expected


# In the file


def test_the_file_has_every_completion_with_text_reward_and_advantage(train, tmp_path):
    train("--samples", "s.jsonl", "--metrics", "m.jsonl", "--cycles", "3")
    lines = entries_of(tmp_path / "s.jsonl")
    assert [(line["cycle"], line["group"]) for line in lines] == [
        (c, g) for c in range(3) for g in (0, 1) for _ in "four"
    ]
    for line in lines:
        assert line["reward"] == sum(line["text"].count(vowel) for vowel in "aeiou") / len(line["tokens"])
        assert line["prompt_text"].encode() == bytes(line["prompt"]) and line["stop_reason"] in ("stop", "length")
    entries = entries_of(tmp_path / "m.jsonl")
    for entry in entries:
        if "cycle" in entry:
            rewards = [line["reward"] for line in lines if line["cycle"] == entry["cycle"]]
            assert entry["reward/mean"] == pytest.approx(sum(rewards) / 8)


def test_the_advantage_is_that_of_the_same_completion(train, tmp_path):
    """In a group the advantages are in the order of the rewards, and their mean is 0."""
    train("--samples", "s.jsonl", "--cycles", "2")
    lines = entries_of(tmp_path / "s.jsonl")
    groups = [lines[start : start + 4] for start in range(0, len(lines), 4)]
    trained = [group for group in groups if group[0]["advantage"] is not None]
    assert trained
    for group in trained:
        ranked = sorted(group, key=lambda line: line["reward"])
        assert [line["advantage"] for line in ranked] == sorted(line["advantage"] for line in group)
        assert sum(line["advantage"] for line in group) == pytest.approx(0, abs=1e-6)


def test_rewards_of_a_build_batch_loss_are_found_too(train, tmp_path):
    train("--samples", "s.jsonl", "--cycles", "1", build_loss="algorithms.reinforce_pp:build_loss")
    assert all(line["reward"] is not None for line in entries_of(tmp_path / "s.jsonl"))


def test_rewards_that_only_ctx_reward_knows_are_found_too(train, tmp_path):
    train("--samples", "s.jsonl", "--reward", "asks_only:reward", "--cycles", "1", build_loss="asks_only:build_loss")
    for line in entries_of(tmp_path / "s.jsonl"):
        assert line["reward"] == sum(line["text"].count(vowel) for vowel in "aeiou") / len(line["tokens"])


def test_the_best_and_the_worst_of_a_group_are_kept(train, tmp_path):
    def rewards(*arguments):
        (tmp_path / "s.jsonl").unlink(missing_ok=True)
        train("--cycles", "1", "--samples", "s.jsonl", *arguments)
        return [line["reward"] for line in entries_of(tmp_path / "s.jsonl") if line["group"] == 0]

    whole = rewards()
    assert rewards("--samples-per-group", "1") == [max(whole)]
    assert sorted(rewards("--samples-per-group", "2")) == [min(whole), max(whole)]
    assert rewards("--samples-per-group", "9") == whole


def test_the_samples_of_a_resumed_run_are_those_of_one_that_never_stopped(train, tmp_path):
    """The second run ends two cycles after its last state; they are moved away, and sampled again."""
    train("--cycles", "6", "--metrics", "whole.jsonl", "--samples", "whole-s.jsonl")
    files = ("--metrics", "m.jsonl", "--samples", "s.jsonl", "--show-every", "2")
    first = train("--cycles", "5", *files, "--save-every", "3")
    state_id = re.search(r"^saved (state-\w+): the next cycle is 3$", first.stderr, re.MULTILINE)[1]
    with (tmp_path / "s.jsonl").open("a") as file:
        file.write('{"cycle": 5, "cut o')
    again = train("--cycles", "3", *files, "--resume-from", state_id)
    assert f"{tmp_path}/s.jsonl holds after that state is moved to {tmp_path}/s.jsonl.superseded" in again.stderr
    assert entries_of(tmp_path / "s.jsonl") == entries_of(tmp_path / "whole-s.jsonl")
    assert (tmp_path / "s.jsonl.superseded").read_text().count('{"cycle": ') == 17


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--samples", "old.jsonl"), "--samples old.jsonl exists: give another name, or remove it"),
        (("--samples", "x.jsonl", "--metrics", "x.jsonl"), "--metrics and --samples are both x.jsonl"),
        (("--samples", "nowhere/s.jsonl"), "--samples nowhere/s.jsonl: there is no folder nowhere"),
        (("--samples", "held.jsonl"), "--samples held.jsonl: another loop is writing it"),
        (("--samples-per-group", "2"), "--samples-per-group needs --samples"),
        (
            ("--samples", "m.jsonl", *RESUME),
            "it is not a file of samples",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_before_anything_is_created(run_loop, tmp_path, arguments, message):
    (tmp_path / "old.jsonl").write_text('{"cycle": 0, "tokens": []}\n')
    (tmp_path / "m.jsonl").write_text('{"config": {}}\n')
    (tmp_path / "held.jsonl").write_text("\n")
    with (tmp_path / "held.jsonl").open("a") as held:
        assert lock(held)
        done = run_loop("rl_loop", "--build-loss", GRPO, *arguments)
    check_refused(done, message)
