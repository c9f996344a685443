"""The contract between the reference loop and the one function that its user writes.

``build_loss(sample, cycle, request, ctx)`` returns the payload of ``forward_backward``. ``sample`` is the sampler's
result, unchanged (``sequences``: a list of ``{"tokens", "logprobs", "stop_reason"}``), ``cycle`` counts from 0,
``request`` is the payload that was sampled, and ``ctx`` is a LoopContext. ``policy_payload`` does the last step of
most build_loss functions: it makes the payload from the advantages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from whitney_loop.datums import rl_datum
from whitney_loop.payloads import forward_backward_payload

if TYPE_CHECKING:
    from whitney_loop.client import WhitneyClient


class NoGradientSignal(ValueError):
    """A build_loss raises it to skip the step of this cycle, for example if all rewards are equal."""


@dataclass
class SecondRun:
    """A run beside the policy's, in the same session. Its operations are ordered and billed like any other."""

    client: WhitneyClient
    run_id: str
    state_id: str | None  # of the state that it was opened from or last saved as; None: the base model
    rank: int
    frozen: bool

    @cached_property
    def sampler_id(self) -> str:
        """A sampler of the weights that the run has when this is read for the first time."""
        saved = self.client.run_operation(self.run_id, "save_weights_for_sampler", {})
        return str(saved["sampler_id"])


def _without_a_loop(name: str, **_: object) -> SecondRun:
    raise RuntimeError(f"the second run {name!r} needs a loop of whitney_loop.loop, which saves and ends it")


def _no_reward(sequence: Mapping[str, Any], request: Mapping[str, Any], /) -> float:
    raise RuntimeError("ctx.reward needs a loop of whitney_loop.loop, which has the function of --reward")


@dataclass
class LoopContext:
    """The live client with the ids of this cycle, and places where a build_loss may keep things.

    Operations that a build_loss sends through ``client`` are ordered and billed like the loop's own. ``client``,
    ``run_id``, ``sampler_id`` and ``provider`` are Whitney's documentation; the rest is this project's.
    """

    client: WhitneyClient
    run_id: str
    sampler_id: str  # the weights that this cycle's sample came from
    provider: str
    session_id: str
    model: str
    metrics: dict[str, Any] = field(default_factory=dict)
    """Filled by the build_loss, logged with the cycle, emptied before the next."""
    state: dict[str, Any] = field(default_factory=dict)
    """Kept as long as the loop runs; empty again when a training is resumed."""
    second_run: Callable[..., SecondRun] = _without_a_loop
    """``second_run(name, *, rank=None, state_id=None, frozen=False)``: a run beside the policy's, such as a critic.

    The first call opens the run, at the base model or from ``state_id``; later calls return it. A call with another
    ``state_id`` ends it and opens it anew from that state. Default of ``rank``: the policy's. The run ends with the
    training. It is saved whenever the policy is, unless it is ``frozen``: a frozen run is never stepped. A resumed
    training opens it from its saved state, which the metrics file names; without that file it raises ValueError.
    """
    reward: Callable[[Mapping[str, Any], Mapping[str, Any]], float] = _no_reward
    """``reward(sequence, request)``: the reward of a completion by ``--reward``; by default its share of vowels.

    The loop starts the reward when the sample arrives. A completion that build_loss sampled itself is scored at once.
    """
    resources: ExitStack = field(default_factory=ExitStack)
    """Closed by the loop: ``ctx.resources.enter_context(lora_run(…))`` opens a run that every exit cleans up."""


class BuildLoss(Protocol):
    """The type of the callable."""

    def __call__(
        self, sample: dict[str, Any], cycle: int, request: dict[str, Any], ctx: LoopContext, /
    ) -> dict[str, Any]: ...


def policy_payload(
    sample: Mapping[str, Any],
    request: Mapping[str, Any],
    advantages: Iterable[float | Iterable[float]],
    loss_function: str,
    *,
    provider: str,
    clip_low: float | None = None,
    clip_high: float | None = None,
    loss_config: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the payload that trains the policy on one group of completions.

    ``advantages`` has one entry per completion: a number, or a list with one number per token. A completion without
    tokens is left out, because no loss has a term for it. ``clip_low`` and ``clip_high`` are probability ratios
    (0.8 and 1.2), sent in the form that ``provider`` takes. ``loss_config`` takes the loss's other keys.
    Raise NoGradientSignal if every completion is empty. Raise ValueError if ``advantages`` has another length than the
    group, or for the reasons of ``rl_datum``.
    """
    sequences, advantages = sample["sequences"], list(advantages)
    if len(advantages) != len(sequences):
        raise ValueError(f"advantages has {len(advantages)} entries, but the group has {len(sequences)} completions")
    clip, config = clip_arguments(provider, clip_low, clip_high)
    prompt = request["prompt"]["token_ids"]
    data = [
        rl_datum(prompt, sequence["tokens"], sequence["logprobs"], advantage, **clip)
        for sequence, advantage in zip(sequences, advantages, strict=True)
        if sequence["tokens"]
    ]
    if not data:
        raise NoGradientSignal("every completion is empty")
    return forward_backward_payload(data, loss_function, {**config, **(loss_config or {})})


def clip_arguments(
    provider: str, clip_low: float | None, clip_high: float | None
) -> tuple[dict[str, float], dict[str, float]]:
    """Return a clip range in the form that ``provider`` takes: ``(keywords of rl_datum, loss_config)``.

    Tinker takes it as tensors of each datum and Modal in ``loss_config``, so one of the two is empty.
    Source: Whitney, "Provider loss support".
    """
    given = {name: ratio for name, ratio in (("clip_low", clip_low), ("clip_high", clip_high)) if ratio is not None}
    if provider == "tinker":
        return given, {}
    return {}, {f"{name}_threshold": ratio for name, ratio in given.items()}
