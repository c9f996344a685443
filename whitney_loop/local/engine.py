"""What a training engine must do for the embedded service.

The service keeps the rules: sessions, order, exactly once, refusals. An engine keeps the mathematics: one object
holds the model, the gradients and the optimizer of one run. One thread at a time calls it, in ``seq_id`` order, with
payloads that were checked before.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

JSONObject = dict[str, Any]


class EngineError(Exception):
    """An operation that fails and leaves the engine unchanged. ``code`` and message go to the client."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Sampler(Protocol):
    """A frozen copy of the weights; later steps of its engine do not change it."""

    version: int
    """Number of optimizer steps that the weights had seen."""

    def sample(self, request: JSONObject, seed: str, proceed: Callable[[], None]) -> list[JSONObject]:
        """Return the ``sequences`` for a sample payload: a list of ``{"tokens", "logprobs", "stop_reason"}``.

        ``seed`` decides everything random: the same seed and request give the same sequences. Call ``proceed`` every
        few tokens, since one sequence alone can take hours; it raises when the run is cancelled, which ends the call.
        """

    def logprobs(self, token_ids: list[int]) -> list[float | None]:
        """Return one logprob per token given those before it; the first is None."""


class Engine(Protocol):
    """The trainable model of one run."""

    losses: frozenset[str]
    """The losses that it computes. Any other is refused as ``unsupported_loss``."""

    def forward(self, payload: JSONObject) -> JSONObject:
        """Return ``{"loss", "metrics", "outputs"}`` of a ForwardPayload; change nothing.

        ``metrics`` of a loss that clips have ``clip_frac``. Outputs of ``ppo_critic`` have ``values``; its data may
        come without ``values`` and ``returns`` here.
        """

    def forward_backward(self, payload: JSONObject) -> JSONObject:
        """Return what ``forward`` returns, and add the gradient to what is accumulated for the next step."""

    def optim_step(self, optimizer: JSONObject) -> JSONObject:
        """Take one AdamW step and zero the gradients; return ``{"step", "grad_norm"}``, the norm before clipping.

        Raises EngineError ``no_gradients`` if nothing was accumulated since the last step.
        """

    def sampler(self) -> Sampler:
        """Return a frozen copy of the weights."""

    def save_state(self, folder: Path) -> int:
        """Write weights and optimizer into the empty ``folder``; return the step.

        If this raises, the caller removes the folder.
        """

    def load_state(self, folder: Path) -> None:
        """Take weights, optimizer and step from a folder of ``save_state``. Raises ValueError if it is damaged."""

    def export_lora(self, folder: Path, *, base_model: str) -> None:
        """Write a PEFT adapter into the empty ``folder``: ``adapter_config.json`` and ``adapter_model.safetensors``."""
