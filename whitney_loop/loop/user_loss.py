"""The user's function: how it is found, called for each request or once for all, and how its result is checked."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from whitney_loop.build_loss import LoopContext, NoGradientSignal
from whitney_loop.callables import callable_of, load_module, optional_callable, require_parameters
from whitney_loop.errors import UnexpectedResponse
from whitney_loop.loop.metrics import Payload
from whitney_loop.loop.options import UsageError
from whitney_loop.loop.prompts import Request
from whitney_loop.loop.report import CallableError, Summary
from whitney_loop.loop.rewards import Rewards, load_rewards
from whitney_loop.loop.signals import raise_if_signalled
from whitney_loop.losses import require_advertised_loss
from whitney_loop.payloads import check_payload
from whitney_loop.results import result_sequences

BATCH_NAME, EVALUATE_NAME = "build_batch_loss", "evaluate"
# With these losses the gradient is 0 if every advantage is; dro pulls towards the sampler all the same.
ZERO_GRADIENT_WITHOUT_ADVANTAGE = frozenset({"importance_sampling", "ppo", "cispo", "gspo", "dppo"})


@dataclass(frozen=True)
class UserLoss:
    """The functions of ``--build-loss`` and ``--reward``, and the facts that their modules state."""

    build_loss: Callable[..., Any]
    build_batch_loss: Callable[..., Any] | None  # if the module has one, it is called instead
    loss_function: str | None  # the module's LOSS_FUNCTION
    operations: tuple[str, ...]  # the module's OPERATIONS, which it uses beside the loop's own
    rewards: Rewards
    has_reward: bool  # whether --reward is given; the default costs nothing until a build_loss asks for it
    decode: Callable[..., Any] | None  # token ids to text, of its module or of the reward's
    evaluate: Callable[..., Any] | None  # of the module of the reward or of build_loss; it wins over the reward


@dataclass
class Built:
    """The result of the user's function in one cycle."""

    payload: Payload | None  # None: no group has a gradient signal
    skip_reason: str = ""
    metrics: list[object] = field(default_factory=list)  # ctx.metrics as each call left it
    uniform_groups: int | None = None  # groups without a gradient signal; None if only build_batch_loss knows


def load_user_loss(
    spec: str, provider: str, *, reward: str | None = None, reward_threads: int = 1, evaluates: bool = False
) -> UserLoss:
    """Load the functions that ``--build-loss`` and ``--reward`` name, and ``evaluate`` of their modules.

    Raise UsageError if one cannot be used, if the provider lacks the loss that the module of build_loss names as
    ``LOSS_FUNCTION``, or if its ``OPERATIONS`` are not names.
    """
    try:
        module, name = load_module(spec, "--build-loss")
        build_loss = callable_of(module, name, "--build-loss")
        require_parameters(build_loss, name, ("sample", "cycle", "request", "ctx"), "--build-loss")
        batch = optional_callable(module, BATCH_NAME, ("samples", "cycle", "requests", "ctx"), "--build-loss")
        evaluate = None
        if evaluates:
            modules = [module] if reward is None else [load_module(reward, "--reward")[0], module]
            owner = next((each for each in modules if hasattr(each, EVALUATE_NAME)), module)
            evaluate = optional_callable(owner, EVALUATE_NAME, ("samples", "cycle", "requests", "ctx"), "--eval-json")
    except ValueError as error:
        raise UsageError(f"{error}") from None
    loss_function = getattr(module, "LOSS_FUNCTION", None)
    try:
        if loss_function is not None:
            require_advertised_loss(provider, loss_function)
    except ValueError as error:
        raise UsageError(f"--build-loss: {module.__name__}.LOSS_FUNCTION: {error}") from None
    operations = getattr(module, "OPERATIONS", ())
    if not isinstance(operations, (tuple, list)) or not all(isinstance(kind, str) for kind in operations):
        raise UsageError(f"--build-loss: {module.__name__}.OPERATIONS is {operations!r}, expected a tuple of names")
    rewards = load_rewards(reward, reward_threads)
    decode = getattr(module, "decode", rewards.decode)
    return UserLoss(
        build_loss=build_loss,
        build_batch_loss=batch,
        loss_function=loss_function,
        operations=tuple(operations),
        rewards=rewards,
        has_reward=reward is not None,
        evaluate=evaluate,
        decode=decode if callable(decode) else None,
    )


def take_sample(summary: Summary, loss: UserLoss, requests: Sequence[Request], index: int, sample: Payload) -> None:
    """Check the sample of a request as soon as it is there, count its tokens, and start its rewards.

    Raise UnexpectedResponse, with the index and the request, if it cannot be trained on.
    """
    try:
        sequences = result_sequences(sample)
    except UnexpectedResponse as error:
        error.index, error.payload = index, requests[index]
        raise
    summary.tokens_sampled += sum(len(sequence["tokens"]) for sequence in sequences)
    if loss.has_reward:
        loss.rewards.start(sequences, requests[index])


def build(loss: UserLoss, samples: list[Payload], cycle: int, requests: Sequence[Payload], ctx: LoopContext) -> Built:
    """Return the payload of the cycle: from ``build_batch_loss``, or from a call of ``build_loss`` per request."""
    if loss.build_batch_loss is not None:
        try:
            payload = _call(BATCH_NAME, loss.build_batch_loss, samples, cycle, requests, ctx, f"in cycle {cycle}")
        except NoGradientSignal as reason:
            return Built(None, f"{reason}", [ctx.metrics])
        return Built(payload, metrics=[ctx.metrics])
    built = Built(None, uniform_groups=0)
    payloads: list[tuple[str, Payload]] = []
    for index, (sample, request) in enumerate(zip(samples, requests, strict=True)):
        where = f"in cycle {cycle}" + (f" for request {index} of {len(requests)}" if len(requests) > 1 else "")
        try:
            payloads.append((where, _call("build_loss", loss.build_loss, sample, cycle, request, ctx, where)))
        except NoGradientSignal as reason:
            built.uniform_groups = (built.uniform_groups or 0) + 1
            built.skip_reason = built.skip_reason or f"{reason}"
        built.metrics.append(ctx.metrics)
    if payloads:
        built.payload = _joined(payloads)
    elif len(requests) > 1:
        built.skip_reason = f"none of {len(requests)} groups has a signal; the first: {built.skip_reason}"
    return built


def _call(
    name: str, function: Callable[..., Any], sampled: Any, cycle: int, asked: Any, ctx: LoopContext, where: str
) -> Payload:
    """Return the payload of the user's function. Raise ValueError if the provider would refuse it."""
    ctx.metrics = {}
    try:
        payload: Payload = function(sampled, cycle, copy.deepcopy(asked), ctx)
    except (NoGradientSignal, KeyboardInterrupt, CallableError):  # CallableError: of ctx.reward
        raise
    except BaseException as error:  # else a sys.exit() of the user's would end a failed loop with 0
        raise CallableError(f"{name} raised {type(error).__name__} {where}: {error}") from error
    raise_if_signalled()  # a bare ``except:`` of the user's may have caught the exception of a Ctrl-C
    if payload is None:
        raise ValueError(
            f"{name} returned None {where} (is its return missing?): return a payload, or raise NoGradientSignal to "
            "skip the step"
        )
    if isinstance(payload, dict) and payload.get("data") == []:
        raise ValueError(f"{name} returned no data {where}: if nothing is left to train on, raise NoGradientSignal")
    try:
        check_payload(payload, ctx.provider)
    except ValueError as error:
        raise ValueError(f"{name} returned, {where}, what {ctx.provider} would refuse: {error}") from None
    if not has_signal(payload):
        raise NoGradientSignal("every advantage is 0")
    return payload


def has_signal(payload: Payload) -> bool:
    """Return False if the gradient is 0 for any weights: a step would only be billed, and decay the weights."""
    if payload["loss_function"] not in ZERO_GRADIENT_WITHOUT_ADVANTAGE:
        return True
    tensors = [datum["loss_inputs"] for datum in payload["data"]]
    return any(
        weight and advantage
        for datum in tensors
        for weight, advantage in zip(datum["weights"]["values"], datum["advantages"]["values"], strict=True)
    )


def _joined(payloads: list[tuple[str, Payload]]) -> Payload:
    """Return one payload with the data of all. Raise ValueError if they differ in the loss or its configuration."""
    (first_where, first), *others = payloads
    for where, payload in others:
        for name in ("loss_function", "loss_config"):
            if payload[name] != first[name]:
                raise ValueError(
                    f"build_loss returned {name} {first[name]!r} {first_where}, but {payload[name]!r} {where}: the "
                    "data of a cycle go into one forward_backward, so return the same for every request"
                )
    return first | {"data": [datum for _, payload in payloads for datum in payload["data"]]}
