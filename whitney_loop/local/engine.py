"""The interface between the embedded service and a training engine. ``README.md`` says how to write an engine.

The service enforces the rules of the API; an engine does the mathematics. A ``Backend`` is an engine with its model
loaded, an ``Engine`` is one run on it, a ``Sampler`` is a frozen copy of a run's weights. Each run has its own thread,
which calls the run's engine and samplers in ``seq_id`` order, one call at a time, with payloads that were checked.
Different runs call at the same time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from whitney_loop.callables import load_callable

JSONObject = dict[str, Any]


class EngineError(Exception):
    """An operation failed and changed nothing in the engine. ``code`` and message are sent to the client.

    After any other exception of ``forward_backward`` or ``optim_step`` the weights may have changed, so the run fails.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Sampler(Protocol):
    """A frozen copy of the weights; later steps of its engine do not change it."""

    version: int
    """The number of optimizer steps that made these weights."""

    def sample(self, request: JSONObject, seed: str) -> list[JSONObject]:
        """Return the ``sequences`` for a sample payload: a list of ``{"tokens", "logprobs", "stop_reason"}``.

        All randomness comes from ``seed``: the same seed and request give the same sequences.
        """

    def logprobs(self, token_ids: list[int]) -> list[float | None]:
        """Return the logprob of each token given the tokens before it; the first is None."""

    def close(self) -> None:
        """Free the sampler's resources; it is not called again."""


@runtime_checkable
class BatchSampler(Sampler, Protocol):
    """A sampler that can take several requests at once, which is faster. This is optional."""

    def sample_many(self, requests: list[tuple[JSONObject, str]]) -> list[list[JSONObject]]:
        """Return, for each request and its seed, exactly what ``sample`` would return for it alone.

        If this raises, the service calls ``sample`` for each request.
        """


class Engine(Protocol):
    """The trainable model of one run."""

    def forward(self, payload: JSONObject) -> JSONObject:
        """Return ``{"loss", "metrics", "outputs"}`` of a ForwardPayload; change nothing.

        A loss that clips has the metric ``clip_frac``. Outputs of ``ppo_critic`` have ``values``; its data may lack
        ``values`` and ``returns`` here.
        """

    def forward_backward(self, payload: JSONObject) -> JSONObject:
        """Return what ``forward`` returns, and add the gradient to the accumulated one."""

    def optim_step(self, optimizer: JSONObject) -> JSONObject:
        """Take one AdamW step and zero the gradient; return ``{"step", "grad_norm"}``, the norm before clipping.

        Raise EngineError ``no_gradients`` if nothing was accumulated since the last step, and ``non_finite_update``
        if a weight would become NaN or infinite; then nothing changes.
        """

    def sampler(self) -> Sampler:
        """Return a frozen copy of the weights."""

    def save_state(self, folder: Path) -> int:
        """Write weights and optimizer into the empty ``folder``; return the number of steps.

        If this raises, the service removes the folder.
        """

    def load_state(self, folder: Path) -> None:
        """Take weights, optimizer and step from a folder of ``save_state``. Raise ValueError if it is damaged."""

    def export_lora(self, folder: Path, *, base_model: str) -> None:
        """Write a PEFT adapter into the empty ``folder``: ``adapter_config.json`` and ``adapter_model.safetensors``."""

    def close(self) -> None:
        """Free the run's resources; its samplers are closed already, and it is not called again."""


class Backend(Protocol):
    """An engine with its model loaded, and its limits. A subclass states only the limits that it has.

    The service refuses a request beyond a limit with HTTP 422, and names the limit and the value.
    """

    name: str
    """The name of the engine, for messages and saved states. A state of another engine is refused."""

    model: str
    """The name of the model that it trains."""

    stands_in: bool = False
    """Whether runs may name any model, though only this one is trained. Only the embedded engine does this."""

    losses: frozenset[str]
    """The losses that it computes."""

    vocabulary: int | None = None
    """All token ids must be below this number. None: no limit."""

    context_length: int | None = None
    """The most tokens of a text; a prompt and its completion are one text."""

    largest_rank: int | None = None

    most_runs: int | None = None
    """The most runs at one time. A new run may begin while an ended run is still being closed."""

    clips_gradients: bool = True
    """Whether ``optim_step`` obeys ``grad_clip_norm``."""

    suggested_learning_rate: float | None = None
    """A good default for loops that start this engine themselves."""

    decode: Callable[[Sequence[int]], str] | None = None
    """Turns token ids into text, if the engine has a tokenizer."""

    def new_run(self, *, rank: int, seed: int, proceed: Callable[[], None]) -> Engine:
        """Return a run that starts at the base model with a new adapter, initialised from ``seed``.

        Each long call, of this method, of the Engine or of a Sampler, must call ``proceed`` about once a second. It
        raises if the run is being cancelled; let that exception pass, in whatever state it leaves the run.
        """


_READERS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "bool": lambda text: {"true": True, "false": False}[text],
}


def load_backend(spec: str, options: Sequence[str] = ()) -> Backend:
    """Call ``MODULE:CALLABLE`` with ``options``, a list of NAME=VALUE, and return the Backend that it makes.

    A value is read as int, float or bool (true, false) if its parameter has that annotation, else as text. Raise
    ValueError if the callable cannot be found, an option is unknown, missing or invalid, or the engine cannot start.
    """
    make = load_callable(spec, "--engine")
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)  # without *args and **kwargs
    parameters = {name: each for name, each in inspect.signature(make).parameters.items() if each.kind in by_name}
    arguments: dict[str, Any] = {}
    for option in options:
        name, separator, text = option.partition("=")
        if not separator:
            raise ValueError(f"--engine-option {option!r}: expected NAME=VALUE")
        if name not in parameters:
            raise ValueError(f"--engine-option: {spec} has no {name!r}; it has {', '.join(parameters) or 'none'}")
        arguments[name] = _value(name, text, parameters[name].annotation)
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in arguments:
            raise ValueError(f"--engine {spec} needs --engine-option {name}=…")
    try:
        backend: Backend = make(**arguments)
    except Exception as error:  # the user can correct most of these: a missing package, a folder without a model
        raise ValueError(f"--engine {spec} cannot start: {type(error).__name__}: {error}") from error
    if missing := [name for name in (*Backend.__annotations__, "new_run") if not hasattr(backend, name)]:
        raise ValueError(f"--engine {spec} made a {type(backend).__name__} without {', '.join(missing)}")
    return backend


def _value(name: str, text: str, annotation: Any) -> Any:
    kind = getattr(annotation, "__name__", annotation)  # postponed annotations are strings
    try:
        return _READERS.get(kind, str)(text)
    except (ValueError, LookupError):
        raise ValueError(f"--engine-option {name}={text}: expected a value of type {kind}") from None
