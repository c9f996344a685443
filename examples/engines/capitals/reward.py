"""The reward of the capitals task: a completion must name the capital, and the shorter it is the better.

Without the name it is 0. "The capital of France is Paris." has 0.52, "Paris" 0.92. A small model begins with talk that
fills all its tokens, often in other languages. ``capitals/prompts.py`` writes the prompts.
"""

import functools
from typing import Any

from transformers import AutoTokenizer

LONGEST = 64  # characters: about as many as MAX_TOKENS tokens of capitals/prompts.py


@functools.cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained("capitals_tokenizer")  # written by capitals/prompts.py


def decode(tokens: list[int]) -> str:
    return str(tokenizer().decode(tokens, skip_special_tokens=True))


def reward(text: str, request: dict[str, Any]) -> float:
    names_it = request["metadata"]["answer"] in text
    return max(0.0, 1 - len(text.strip()) / LONGEST) if names_it else 0.0
