"""The capitals task, with a tiny random model that has a tokenizer of bytes and a chat template."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
tokenizers = pytest.importorskip("tokenizers")

from loop_runs import EXAMPLES, entries_of  # noqa: E402

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def model(tiny):
    """The folder of a tiny model with a tokenizer: a token per byte, and <end>."""
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(sorted(letters))}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    folder = tiny("llama")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", chat_template=CHAT_TEMPLATE
    ).save_pretrained(folder)
    return folder


def run(folder, script, *arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES)}
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def reward_of(folder, calls):
    """What the reward module in ``examples/`` returns for each (name, arguments)."""
    program = (
        "import json, sys; import engines.capitals.reward as reward\n"
        "print(json.dumps([getattr(reward, name)(*arguments) for name, arguments in json.loads(sys.argv[1])]))"
    )
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES)}
    command = [sys.executable, "-c", program, json.dumps(calls)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_the_prompts_are_written_and_the_loop_trains_on_them_with_the_reward_of_decoded_text(model, tmp_path):
    assert "wrote 8 prompts" in run(tmp_path, "engines/capitals/prompts.py", model)
    requests = entries_of(tmp_path / "capitals.jsonl")
    assert requests[0]["metadata"] == {"answer": "Paris"}
    assert requests[0]["sampling_params"]["stop"] == [256]

    question = requests[0]["prompt"]["token_ids"]
    asked = {"metadata": {"answer": "Paris"}}
    texts = ["Paris", "It is Paris.", "London", " Paris \n"]
    text, *rewards = reward_of(tmp_path, [("decode", [question]), *(("reward", [each, asked]) for each in texts)])
    assert text == "What is the capital of France?\n"
    assert rewards == [1 - 5 / 64, 1 - 12 / 64, 0.0, 1 - 5 / 64]

    (tmp_path / "any_letter.py").write_text(  # a random model names no capital
        "from engines.capitals.reward import decode\n"
        "def reward(text, request): return text.count('a') + len(text) / 100\n"
    )
    loop = ["rl_loop.py", "--build-loss", "grpo_build_loss:build_loss", "--reward", "any_letter:reward"]
    loop += ["--sample-json", "capitals.jsonl", "--batch-size", "2", "--cycles", "2", "--lora-rank", "2"]
    loop += ["--metrics", "metrics.jsonl"]
    loop += ["--engine", "engines.torch_lora:make", "--engine-option", f"model={model}"]
    output = run(tmp_path, *loop)
    assert f"{model} by torch-lora" in output
    assert "learning rate 0.001, which torch-lora suggests" in output
    lines = entries_of(tmp_path / "metrics.jsonl")
    assert [line["version"] for line in lines if "reward/mean" in line] == [0, 1]
