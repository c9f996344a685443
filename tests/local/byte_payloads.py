"""Payloads and requests for byte-lm, and an engine that has trained on some."""

from __future__ import annotations

import random

from whitney_loop.local.byte_lm import ByteLM
from whitney_loop.local.byte_model import END

ADAMW = {
    "type": "adamw",
    "learning_rate": 0.1,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}


def tensor(values, dtype="float32"):
    return {"dtype": dtype, "shape": [len(values)], "values": list(values)}


def datum(tokens, targets, weights, logprobs=None, advantages=None, **further):
    inputs = {"target_tokens": tensor(targets, "int64"), "weights": tensor(weights)}
    if logprobs is not None:
        inputs |= {"logprobs": tensor(logprobs), "advantages": tensor(advantages)}
    inputs |= {name: tensor(values) for name, values in further.items()}
    return {"input": {"token_ids": list(tokens)}, "loss_inputs": inputs}


def payload(*data, loss="cross_entropy", **config):
    return {"data": list(data), "loss_function": loss, "loss_config": config}


def text_payload(text: bytes):
    return payload(datum(text[:-1], text[1:], [1.0] * (len(text) - 1)))


def random_payload(loss, seed, **config):
    """Return data with repeated contexts (a small alphabet), masked positions, and fractional weights.

    Some logprobs are near the policy's, and some so far off that the ratio reaches its limit.
    """
    rng = random.Random(seed)
    data = []
    for n in (1, 5, 9):
        tokens, targets = ([rng.choice([*b"abc", END]) for _ in range(n)] for _ in range(2))
        weights = [rng.choice([0.0, 0.25, 1.0, 1.5]) for _ in range(n)]
        logprobs = [rng.choice([rng.uniform(-6.0, -2.0), -40.0]) for _ in range(n)]
        advantages = [rng.gauss(0.0, 1.0) for _ in range(n)]
        critic = {name: [rng.gauss(0.0, 1.0) for _ in range(n)] for name in ("values", "returns")}
        data.append(datum(tokens, targets, weights, logprobs, advantages, **critic))
    return payload(*data, loss=loss, **config)


def request(prompt=b"the ", num_samples=4, max_tokens=24, **params):
    return {
        "prompt": {"token_ids": list(prompt)},
        "num_samples": num_samples,
        "sampling_params": {"max_tokens": max_tokens, "temperature": 1.0, "top_p": 1.0, "top_k": -1, **params},
    }


def trained(steps=3, rank=4, seed=0):
    engine = ByteLM(rank, seed)
    for step in range(steps):
        engine.forward_backward(random_payload("cross_entropy", f"train {step}"))
        engine.forward_backward(random_payload("ppo_critic", f"train {step}"))
        engine.optim_step(ADAMW)
    return engine


def state_of(engine):
    """Everything that decides the future: weights, moments, gradients, step."""
    moments = engine._moment1, engine._moment2
    return engine._policy.weights, *moments, engine._gradient, engine.sampler().version
