"""The contract between the reference loop and the one function that its user writes.

``build_loss(sample, cycle, request, ctx)`` returns the payload of ``forward_backward``. ``sample`` is the
sampler's result as it came (``sequences``: a list of ``{"tokens", "logprobs", "stop_reason"}``), ``cycle`` counts
from 0, ``request`` is the payload that was sampled, and ``ctx`` is a LoopContext.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from whitney_loop.client import WhitneyClient


class NoGradientSignal(ValueError):
    """Raised by a build_loss to skip this cycle's step: the group teaches nothing, as where all rewards are equal."""


@dataclass
class LoopContext:
    """What a build_loss may use: the live client with the ids of this cycle, and room of its own.

    What it asks of ``client`` is ordered and billed like the loop's own operations. ``client``, ``run_id``,
    ``sampler_id`` and ``provider`` are Whitney's documentation; the rest is this project's.
    """

    client: WhitneyClient
    run_id: str
    sampler_id: str  # of the weights that this cycle's sample came from
    provider: str
    session_id: str
    model: str
    metrics: dict[str, Any] = field(default_factory=dict)
    """Filled by the build_loss, logged with the cycle, empty again at the next."""
    state: dict[str, Any] = field(default_factory=dict)
    """Kept as long as the loop: a critic's run id, the reference sampler of cycle 0."""
    resources: ExitStack = field(default_factory=ExitStack)
    """Closed by the loop: ``ctx.resources.enter_context(lora_run(…))`` opens a run that is cleaned up on every exit."""


class BuildLoss(Protocol):
    """The type of the callable."""

    def __call__(
        self, sample: dict[str, Any], cycle: int, request: dict[str, Any], ctx: LoopContext, /
    ) -> dict[str, Any]: ...
