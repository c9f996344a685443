"""How long it takes to build and check a payload, as a multiple of the time that ``json.dumps`` takes for it.

    python tests/benchmarks/bench_datums.py

One payload: 64 completions of 1,024 tokens after a prompt of 512. The best of several runs in one process.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from whitney_loop import check_payload, forward_backward_payload, rl_datum

COMPLETIONS, COMPLETION_TOKENS, PROMPT_TOKENS = 64, 1024, 512
RUNS = 15

rng = random.Random(1)
prompt = [rng.randrange(150_000) for _ in range(PROMPT_TOKENS)]
completions = [[rng.randrange(150_000) for _ in range(COMPLETION_TOKENS)] for _ in range(COMPLETIONS)]
logprobs = [[-rng.expovariate(1) for _ in completion] for completion in completions]


def build() -> dict[str, object]:
    data = [rl_datum(prompt, tokens, sampled, 0.5) for tokens, sampled in zip(completions, logprobs, strict=True)]
    return forward_backward_payload(data, "importance_sampling")


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


if __name__ == "__main__":
    payload = build()
    works = {
        "build": build,
        "check": lambda: check_payload(payload, "modal"),
        "json.dumps": lambda: json.dumps(payload),
    }
    runs = [{name: seconds(work) for name, work in works.items()} for _ in range(RUNS)]
    best = {name: min(run[name] for run in runs) for name in works}  # other work on the machine only adds time
    best["all three"] = sum(best.values())
    for name, taken in best.items():
        print(f"{name:10}  {taken:.4f} s  {taken / best['json.dumps']:.2f}")
