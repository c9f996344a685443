"""The reward of the capitals task: the share of a completion that is the name of the capital.

"Paris" has 1, "The capital of France is Paris." 5 letters of 31, and a completion without the name 0. An instruct model
begins with whole sentences, and learns to say the name alone. ``capitals/prompts.py`` writes the prompts.
"""

import functools
from typing import Any

from transformers import AutoTokenizer


@functools.cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained("capitals_tokenizer")  # written by capitals/prompts.py


def decode(tokens: list[int]) -> str:
    return str(tokenizer().decode(tokens, skip_special_tokens=True))


def reward(text: str, request: dict[str, Any]) -> float:
    answer = request["metadata"]["answer"]
    return len(answer) / len(text.strip()) if answer in text else 0.0
