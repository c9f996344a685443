"""What the embedded service asks of a training engine.

The service (``service.py``) keeps the contract's rules: sessions, order, exactly-once, what is refused. An
engine keeps the mathematics: one object is the model, the gradients and the optimizer of one run. Every call
is made by one thread at a time, in ``seq_id`` order, with a payload that was checked before.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

JSONObject = dict[str, Any]


class EngineError(Exception):
    """An operation that fails: ``code`` and message go to the caller, and the engine is as it was before."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Sampler(Protocol):
    """A frozen copy of the weights; later steps of its engine do not change it."""

    version: int
    """Number of optimizer steps that the weights had seen."""

    def sample(self, request: JSONObject, seed: str, proceed: Callable[[], None]) -> list[JSONObject]:
        """The ``sequences`` for a sample payload: a list of ``{"tokens", "logprobs", "stop_reason"}``.

        ``seed`` decides everything random; the same seed and request give the same sequences. ``proceed`` is called
        every few tokens, since one sequence alone can take hours; what it raises, once nobody wants the sample any
        longer, ends the call.
        """

    def logprobs(self, token_ids: list[int]) -> list[float | None]:
        """One logprob per token given those before it; the first is None."""


class Engine(Protocol):
    """The trainable model of one run."""

    losses: frozenset[str]
    """The losses it computes; any other that a provider advertises is refused as ``unsupported_loss``."""

    def forward(self, payload: JSONObject) -> JSONObject:
        """``{"loss", "metrics", "outputs"}`` of a ForwardPayload; changes nothing.

        ``metrics`` of a loss that clips have ``clip_frac``. Outputs of ``ppo_critic`` have ``values``; its data may
        come without ``values`` and ``returns`` here.
        """

    def forward_backward(self, payload: JSONObject) -> JSONObject:
        """As ``forward``, and adds the loss's gradient to what is accumulated for the next step."""

    def optim_step(self, optimizer: JSONObject) -> JSONObject:
        """One AdamW step; ``{"step", "grad_norm"}``; the gradients are zeroed.

        Raises EngineError ``no_gradients`` where nothing was accumulated since the last step.
        """

    def sampler(self) -> Sampler:
        """A frozen copy of the weights as they are."""

    def save_state(self, path: Path) -> int:
        """Write weights and optimizer to the file ``path``, whole or not at all; returns the step."""

    def load_state(self, path: Path) -> None:
        """Take weights, optimizer and step from a file that ``save_state`` wrote. ValueError where it does not fit."""

    def export_lora(self, folder: Path, *, base_model: str) -> None:
        """Write ``folder`` as a PEFT adapter: ``adapter_config.json`` and ``adapter_model.safetensors``."""
