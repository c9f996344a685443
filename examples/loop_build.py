"""The user's function: found, called for each request or once for all, and what it returns checked and put together."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loop_support import CallableError, Payload, UsageError
from whitney_loop import LoopContext, NoGradientSignal, check_payload, require_advertised_loss

BATCH_NAME = "build_batch_loss"
FLAT_WITHOUT_ADVANTAGE = frozenset({"importance_sampling", "ppo", "cispo", "gspo", "dppo"})  # dro pulls to the sampler


@dataclass(frozen=True)
class UserLoss:
    """What ``--build-loss`` names. What the callables return is not trusted: check_payload judges it."""

    build_loss: Callable[..., Any]
    build_batch_loss: Callable[..., Any] | None  # of the same module; called instead where it is there
    loss_function: str | None  # what the module says that it uses
    operations: tuple[str, ...]  # what it asks the service for beside the loop's own


@dataclass
class Built:
    """What a cycle trains on."""

    payload: Payload | None  # None: no group has a gradient signal, for the reason beside it
    reason: str = ""
    groups: list[dict[str, Any]] = field(default_factory=list)  # ctx.metrics as each call left them
    uniform: int | None = None  # how many groups were left out; None where build_batch_loss alone knows


def load_build_loss(spec: str, provider: str) -> UserLoss:
    """The callable that ``MODULE:CALLABLE`` names, from the current folder or from this one.

    Where its module says ``LOSS_FUNCTION``, the provider must have that loss, and where it says ``OPERATIONS`` the
    service must offer them: no session is opened otherwise.
    """
    if (here := str(Path.cwd())) not in sys.path[:1]:
        sys.path.insert(0, here)
    module_name, _, name = spec.partition(":")
    if not module_name or not name or module_name.startswith("."):
        raise UsageError(f"--build-loss is {spec!r}, expected MODULE:CALLABLE")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(f"--build-loss: no module {module_name!r} in the current folder or in examples/") from None
        raise UsageError(f"--build-loss: importing {module_name!r} raised {type(error).__name__}: {error}") from None
    build_loss, build_batch_loss = getattr(module, name, None), getattr(module, BATCH_NAME, None)
    if build_loss is None:
        raise UsageError(f"--build-loss: module {module_name!r} has no {name!r}")
    for found, called in ((build_loss, name), (build_batch_loss, BATCH_NAME)):
        if found is not None and not callable(found):
            kind = type(found).__name__
            raise UsageError(f"--build-loss: {called!r} of {module_name!r} is of type {kind}, not callable")
    loss_function = getattr(module, "LOSS_FUNCTION", None)
    if loss_function is not None:
        try:
            require_advertised_loss(provider, loss_function)
        except ValueError as error:
            raise UsageError(f"--build-loss: {module_name}.LOSS_FUNCTION: {error}") from None
    operations = getattr(module, "OPERATIONS", ())
    if not isinstance(operations, (tuple, list)) or not all(isinstance(kind, str) for kind in operations):
        raise UsageError(f"--build-loss: {module_name}.OPERATIONS is {operations!r}, expected a tuple of names")
    return UserLoss(build_loss, build_batch_loss, loss_function, tuple(operations))


def build(loss: UserLoss, samples: list[Payload], cycle: int, requests: list[Payload], ctx: LoopContext) -> Built:
    """One payload for the cycle: of ``build_batch_loss``, or of a call of ``build_loss`` for each request."""
    if loss.build_batch_loss is not None:
        return _build_together(loss.build_batch_loss, samples, cycle, requests, ctx)
    built = Built(None, uniform=0)
    payloads: list[tuple[str, Payload]] = []
    for index, (sample, request) in enumerate(zip(samples, requests, strict=True)):
        of_request = f" for request {index} of {len(requests)}" if len(requests) > 1 else ""
        where = f"in cycle {cycle}{of_request}"
        try:
            payloads.append((where, _call("build_loss", loss.build_loss, sample, cycle, request, ctx, where)))
        except NoGradientSignal as reason:
            built.uniform = (built.uniform or 0) + 1
            built.reason = built.reason or f"{reason}"
        built.groups.append(dict(ctx.metrics))
    if payloads:
        built.payload = _joined(payloads)
    elif len(requests) > 1:
        built.reason = f"none of {len(requests)} groups has a signal; the first: {built.reason}"
    return built


def _build_together(
    function: Callable[..., Any], samples: list[Payload], cycle: int, requests: list[Payload], ctx: LoopContext
) -> Built:
    try:
        payload = _call(BATCH_NAME, function, samples, cycle, requests, ctx, f"in cycle {cycle}")
    except NoGradientSignal as reason:
        return Built(None, f"{reason}", [dict(ctx.metrics)])
    return Built(payload, groups=[dict(ctx.metrics)])


def _call(
    name: str, function: Callable[..., Any], sampled: Any, cycle: int, asked: Any, ctx: LoopContext, where: str
) -> Payload:
    """The payload of the user's function, checked whole: one that the provider would refuse is not sent."""
    ctx.metrics.clear()
    try:
        payload: Payload = function(sampled, cycle, copy.deepcopy(asked), ctx)
    except (NoGradientSignal, KeyboardInterrupt):
        raise
    except BaseException as error:  # a sys.exit() of the user's would otherwise end a failed loop with 0
        raise CallableError(f"{name} raised {type(error).__name__} {where}: {error}") from error
    try:
        check_payload(payload, ctx.provider)
    except ValueError as error:
        raise ValueError(f"{name} returned, {where}, what {ctx.provider} would refuse: {error}") from None
    if not has_signal(payload):
        raise NoGradientSignal("every advantage is 0")
    return payload


def has_signal(payload: Payload) -> bool:
    """False where the gradient is 0 whatever the weights are: a step on it would only be billed, and decay them."""
    if payload["loss_function"] not in FLAT_WITHOUT_ADVANTAGE:
        return True
    tensors = [datum["loss_inputs"] for datum in payload["data"]]
    return any(
        weight and advantage
        for datum in tensors
        for weight, advantage in zip(datum["weights"]["values"], datum["advantages"]["values"], strict=True)
    )


def _joined(payloads: list[tuple[str, Payload]]) -> Payload:
    """The data of all in one payload. ValueError where they do not agree on the loss: one operation computes one."""
    (first_where, first), *others = payloads
    for where, payload in others:
        for name in ("loss_function", "loss_config"):
            if payload[name] != first[name]:
                raise ValueError(
                    f"build_loss returned {name} {first[name]!r} {first_where}, but {payload[name]!r} {where}: the "
                    "data of a cycle go into one forward_backward, so return the same for every request"
                )
    return first | {"data": [datum for _, payload in payloads for datum in payload["data"]]}
