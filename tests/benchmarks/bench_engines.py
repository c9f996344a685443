"""Tokens per CPU second that an engine samples and trains, without HTTP; and its memory and time to load.

python tests/benchmarks/bench_engines.py                            # byte-lm
python tests/benchmarks/bench_engines.py engines.torch_lora:make model=FOLDER_OR_NAME
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from whitney_loop.local.byte_lm import ByteLMBackend
from whitney_loop.local.engine import BatchSampler, Sampler, load_backend

PROMPT_TOKENS, MAX_TOKENS, TEXTS = 32, 16, 64
OPTIMIZER = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0}


def main(spec: str = "", *options: str) -> None:
    started = time.perf_counter()
    backend = load_backend(spec, options) if spec else ByteLMBackend()
    print(f"{backend.name}: loaded in {time.perf_counter() - started:.1f} s, {memory_mb():.0f} MB")
    run = backend.new_run(rank=8, seed=1, proceed=lambda: None)
    sampler = run.sampler()
    sampler.sample(request(0, 1), "warm")
    many, one = [(request(i, 4), f"{i}") for i in range(16)], [(request(0, TEXTS), "0")]
    measure("sampled, 1 × 64", lambda: sampled(sampler, one, together=False))
    measure("sampled, 16 × 4, one request after the other", lambda: sampled(sampler, many, together=False))
    if isinstance(sampler, BatchSampler):
        measure("sampled, 16 × 4, together", lambda: sampled(sampler, many, together=True))
    for shape, requests in [("1 × 64", one), ("16 × 4", many)]:
        data = [datum(each["prompt"]["token_ids"]) for each, _ in requests for _ in range(each["num_samples"])]
        payload = {"data": data, "loss_function": "cross_entropy", "loss_config": {}}

        def step(payload: dict = payload) -> int:
            run.forward_backward(payload)
            run.optim_step(OPTIMIZER)
            return sum(len(each["input"]["token_ids"]) for each in payload["data"])

        measure(f"trained, {shape}", step)
    print(f"at most {memory_mb():.0f} MB")


def request(number: int, num_samples: int) -> dict:
    prompt = [(7 * i + 13 * number) % 250 for i in range(PROMPT_TOKENS)]
    params = {"max_tokens": MAX_TOKENS, "temperature": 1.0, "top_p": 1.0, "top_k": -1}
    return {"prompt": {"token_ids": prompt}, "num_samples": num_samples, "sampling_params": params}


def datum(prompt: list[int]) -> dict:
    text = [*prompt, *prompt[:MAX_TOKENS]]
    tensors = {"target_tokens": text[1:], "weights": [1.0] * (len(text) - 1)}
    return {"input": {"token_ids": text[:-1]}, "loss_inputs": {name: {"values": v} for name, v in tensors.items()}}


def sampled(sampler: Sampler, requests: list[tuple[dict, str]], *, together: bool) -> int:
    answers = sampler.sample_many(requests) if together else [sampler.sample(*each) for each in requests]
    return sum(len(sequence["tokens"]) for sequences in answers for sequence in sequences)


def measure(what: str, work: Callable[[], int]) -> None:
    began, began_cpu = time.perf_counter(), time.process_time()
    tokens = work()
    cpu, wall = time.process_time() - began_cpu, time.perf_counter() - began
    print(f"{what}: {tokens} tokens, {tokens / cpu:.0f} per CPU second ({wall:.2f} s)", flush=True)


def memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
