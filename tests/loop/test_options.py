"""The command line: options that are refused before anything is created, and the help page."""

import pytest

from loop_runs import GRPO, check_refused, write_requests


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cycles", "0"], "--cycles is 0, expected at least 1"),
        (["--updates", "-1"], "--updates is -1"),
        (["--batch-size", "2"], "--batch-size is 2, but the number of requests is 1"),
        (["--batch-size", "0"], "--batch-size is 0"),
        (["--max-datums", "0"], "--max-datums is 0"),
        (["--lora-rank", "0"], "--lora-rank is 0"),
        (["--save-every", "0"], "--save-every is 0"),
        (["--timeout", "nan"], "--timeout is nan"),
        (["--timeout", "inf"], "--timeout is inf, expected seconds above 0 and below 1e+09"),
        (["--seed", "-1"], "--seed is -1"),
        (["--seed", str(2**63)], "expected 0 to 2^63 − 1"),
        (["--learning-rate", "nan"], "--learning-rate: optimizer.learning_rate is nan"),
    ],
)
def test_an_option_out_of_range_is_refused(run_loop, tmp_path, arguments, message):
    write_requests(tmp_path / "one.jsonl", ["the "])
    done = run_loop("rl_loop", "--build-loss", GRPO, "--sample-json", "one.jsonl", *arguments)
    check_refused(done, message)


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("rl_loop", [], "the following arguments are required: --build-loss"),
        ("rl_loop", ["--build-loss", GRPO, "--cyc", "3"], "unrecognized arguments: --cyc 3"),
        ("sft_loop", ["--epochs", "many"], "argument --epochs: invalid int value: 'many'"),
        ("distillation_loop", ["--provider", "none"], "argument --provider: invalid choice: 'none'"),
    ],
)
def test_an_option_that_cannot_be_read_exits_with_2(run_loop, script, arguments, message):
    done = run_loop(script, *arguments)
    assert (done.returncode, done.stdout) == (2, "") and message in done.stderr


SHARED = ["--provider", "--lora-rank", "--base-url", "--metrics", "--save-every", "--resume-from", "--first-cycle",
          "--dry-run", "--journal", "--recover"]  # fmt: skip


@pytest.mark.parametrize("script", ["rl_loop", "sft_loop", "distillation_loop"])
def test_the_help_shows_a_command_that_works_and_the_defaults(run_loop, script):
    done = run_loop(script, "--help")
    assert done.returncode == 0
    assert f"python examples/{script}.py --" in done.stdout and "Exit codes: 0 trained" in done.stdout
    assert all(option in done.stdout for option in SHARED)
    assert "else 1e-06" in done.stdout and "None" not in done.stdout
