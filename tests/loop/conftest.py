"""A small data set for the tests of the loop."""

import json

import pytest

from whitney_loop import sample_request


@pytest.fixture
def prompts(tmp_path):
    """Options for a small training on four prompts of a file in ``tmp_path``."""
    requests = [sample_request(text, num_samples=4, max_tokens=6) for text in (b"the ", b"she ", b"they ", b"one ")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(request) + "\n" for request in requests))
    return ["--sample-json", "prompts.jsonl", "--lora-rank", "2", "--seed", "1", "--batch-size", "4"]
