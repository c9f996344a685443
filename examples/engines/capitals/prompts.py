"""Write the prompts of the capitals task: questions as a model's chat template puts them, with their answers.

    python examples/engines/capitals/prompts.py FOLDER_OR_NAME      # of the model; only its tokenizer is read

It writes two things into the current folder: ``capitals.jsonl``, for ``--sample-json``, and ``capitals_tokenizer/``,
with which ``engines.capitals.reward`` decodes. It needs: pip install transformers
"""

import sys
from pathlib import Path

if (Path(__file__).resolve().parents[3] / "whitney_loop" / "__init__.py").is_file():  # a clone runs uninstalled
    sys.path.insert(1, str(Path(__file__).resolve().parents[3]))

from transformers import AutoTokenizer

from whitney_loop.loop.prompts import write_prompts

CAPITALS = {
    "France": "Paris",
    "Japan": "Tokyo",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Russia": "Moscow",
    "England": "London",
    "Greece": "Athens",
}
SAMPLES_PER_PROMPT = 8  # the group in which GRPO compares
MAX_TOKENS = 16  # a sentence


def main(model: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = []
    for country, capital in CAPITALS.items():
        question = [{"role": "user", "content": f"What is the capital of {country}?"}]
        text = tokenizer.apply_chat_template(
            question,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,  # a template that does not know it ignores it
        )
        prompts.append((tokenizer.encode(text, add_special_tokens=False), {"answer": capital}))
    stop = [tokenizer.eos_token_id]
    write_prompts("capitals.jsonl", prompts, num_samples=SAMPLES_PER_PROMPT, max_tokens=MAX_TOKENS, stop=stop)
    tokenizer.save_pretrained("capitals_tokenizer")
    print(f"wrote {len(prompts)} prompts to capitals.jsonl, and capitals_tokenizer/")


if __name__ == "__main__":
    main(*sys.argv[1:])
