"""The payloads of operations: functions that build them, and functions that check them before they are sent.

The embedded service calls the same ``check_…`` functions, so it accepts the form of a payload that passes here. Every
message starts with the path of the mistake: ``data[3].loss_inputs.logprobs.values[17]``.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from whitney_loop.losses import LOSS_CONFIG_KEYS, require_loss_config

_POLICY_LOSSES = ("importance_sampling", "ppo", "cispo", "gspo", "dro", "dppo")

REQUIRED_LOSS_INPUTS: dict[str, frozenset[str]] = {
    "cross_entropy": frozenset({"target_tokens", "weights"}),
    "ppo_critic": frozenset({"target_tokens", "weights", "values", "returns"}),
    **dict.fromkeys(_POLICY_LOSSES, frozenset({"target_tokens", "weights", "logprobs", "advantages"})),
}
"""Loss → the tensors that each datum must have. A ``forward`` of ``ppo_critic`` needs neither values nor returns."""

_CLIP_TENSORS = frozenset({"clip_low_threshold", "clip_high_threshold"})
_KNOWN_TENSORS = frozenset().union(*REQUIRED_LOSS_INPUTS.values()) | _CLIP_TENSORS
_NO_EPSILON = "thresholds are ratios around 1, not epsilons (for an epsilon of 0.2: clip_low 0.8, clip_high 1.2)"
_WEIGHTED_RANGES = {  # lowest and highest number of a tensor at weights other than 0, and the message about others
    "logprobs": (-math.inf, 1e-3, "but a logprob is at most 0, or 1e-3 by rounding: is its sign flipped?"),
    "clip_low_threshold": (0.0, 1.0, f"expected 0…1: {_NO_EPSILON}"),
    "clip_high_threshold": (1.0, math.inf, f"expected at least 1: {_NO_EPSILON}"),
}

_INT64_MAX = 2**63 - 1
_FLOAT32_MAX = 3.4028234663852886e38  # also in losses, so that functions of both can be copied out

_RANGES: dict[str, Callable[[float], bool]] = {
    "at least 0": lambda number: number >= 0,
    "above 0": lambda number: number > 0,
    "at least 0 and below 1": lambda number: 0 <= number < 1,
    "above 0 and at most 1": lambda number: 0 < number <= 1,
}
_OPTIMIZER_RANGES = {
    "learning_rate": "at least 0",
    "beta1": "at least 0 and below 1",
    "beta2": "at least 0 and below 1",
    "eps": "above 0",
    "weight_decay": "at least 0",
    "grad_clip_norm": "at least 0",
}


def forward_backward_payload(
    data: Sequence[Mapping[str, Any]], loss_function: str, loss_config: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Return a ForwardPayload ``{data, loss_function, loss_config}``. Datums are not checked: see ``check_payload``.

    Raise ValueError if ``data`` is empty or not a list, or ``loss_config`` is not an object.
    Source: Whitney, "Building a forward payload".
    """
    if isinstance(data, (str, Mapping)) or not isinstance(data, Iterable):
        raise ValueError(f"data is {_show(data)}, expected a list of datums")
    data = list(data)
    if not data:
        raise ValueError("data is empty, expected a datum; if there is nothing to train on, raise NoGradientSignal")
    if loss_config is not None and not isinstance(loss_config, Mapping):
        raise ValueError(f"loss_config is {_show(loss_config)}, expected an object; None or {{}} for none")
    config = {key: _plain(value) for key, value in (loss_config or {}).items()}
    return {"data": data, "loss_function": loss_function, "loss_config": config}


def adamw_optimizer(
    learning_rate: float,
    *,
    beta1: float = 0.9,
    beta2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    grad_clip_norm: float = 0.0,
) -> dict[str, Any]:
    """Return the ``optimizer`` of an ``optim_step``. Every field is sent, because the providers' defaults differ.

    ``learning_rate``, ``weight_decay`` ≥ 0; betas in [0, 1); ``eps`` > 0; ``grad_clip_norm`` the largest global
    norm of the gradient, 0 for no clipping. Raise ValueError, with the field, if one is out of its range.
    """
    fields = {"learning_rate": learning_rate, "beta1": beta1, "beta2": beta2, "eps": eps}
    fields |= {"weight_decay": weight_decay, "grad_clip_norm": grad_clip_norm}
    optimizer = {"type": "adamw", **{name: _plain(value) for name, value in fields.items()}}
    check_optimizer_payload({"optimizer": optimizer})
    return optimizer


def sample_request(
    prompt_tokens: Sequence[int],
    *,
    num_samples: int,
    max_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = -1,
    seed: int | None = None,
    stop: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return the payload of ``sample``: ``num_samples`` completions of at most ``max_tokens`` tokens each.

    ``temperature`` ≥ 0 (0 takes the likeliest token), ``top_p`` in (0, 1], ``top_k`` ≥ 1 or −1 for off, ``seed`` ≥ 0,
    ``stop`` a list of token ids that end a completion. The service returns the logprobs of the policy before
    temperature, top_p and top_k are applied, so importance ratios are exact only for 1, 1 and −1.
    Raise ValueError, with the field, if one is out of its range.
    """
    given: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    if seed is not None:
        given["seed"] = seed
    params = {name: _plain(value) for name, value in given.items()}
    if stop is not None:
        params["stop"] = _plain_list(stop)
    prompt = {"token_ids": _plain_list(prompt_tokens)}
    request = {"prompt": prompt, "num_samples": _plain(num_samples), "sampling_params": params}
    check_sample_request(request)
    return request


def logprobs_request(token_ids: Sequence[int]) -> dict[str, Any]:
    """Return the payload of ``logprobs``. The result has one logprob per token, the first None.

    Raise ValueError if there is no token, or if one is not an integer ≥ 0.
    """
    request = {"input": {"token_ids": _plain_list(token_ids)}}
    check_logprobs_request(request)
    return request


def check_payload(payload: object, provider: str, *, kind: str = "forward_backward") -> None:
    """Raise ValueError, with the path of the mistake, if the provider would refuse this ForwardPayload.

    Checks structure, dtypes, shapes, one length per datum, finite numbers within float32, integer token ids ≥ 0, the
    tensors that the loss needs, the provider's losses and config keys, and clip tensors (only Tinker has them). At
    weights other than 0 clip ratios must be around 1, and logprobs not above 0 by more than rounding. ``kind`` is the
    operation, ``forward_backward`` or ``forward``. Source: Whitney, "Loop building blocks", for names, dtypes and
    tables; the rest is this project's reading.
    """
    if kind not in ("forward_backward", "forward"):
        raise ValueError(f"kind is {_show(kind)}, expected 'forward_backward' or 'forward'")
    payload = _require_object(payload, "payload", ("data", "loss_function", "loss_config"))
    loss_function = payload["loss_function"]
    require_loss_config(provider, loss_function, payload["loss_config"])
    required = REQUIRED_LOSS_INPUTS[loss_function]
    if loss_function == "ppo_critic" and kind == "forward":
        required = frozenset({"target_tokens", "weights"})  # it computes the values
    for index, datum in enumerate(_require_list(payload["data"], "data", "datum")):
        _check_datum(datum, f"data[{index}]", loss_function, required, provider)


def check_sample_request(request: object, *, in_file: bool = False) -> None:
    """Raise ValueError if the payload of a ``sample`` breaks the ranges of ``sample_request``.

    ``in_file``: it may also have ``metadata``, an object that is never sent.
    """
    also = ("metadata",) if in_file else ()
    request = _require_object(request, "request", ("prompt", "num_samples", "sampling_params"), also)
    if not isinstance(request.get("metadata", {}), dict):
        raise ValueError(f"metadata is {_show(request['metadata'])}, expected an object")
    _check_token_ids(_require_object(request["prompt"], "prompt", ("token_ids",))["token_ids"], "prompt.token_ids")
    _require_integer(request["num_samples"], "num_samples", low=1)
    optional = ("temperature", "top_p", "top_k", "seed", "stop")
    params = _require_object(request["sampling_params"], "sampling_params", ("max_tokens",), optional)
    _require_integer(params["max_tokens"], "sampling_params.max_tokens", low=1)
    _require_number(params.get("temperature", 1.0), "sampling_params.temperature", "at least 0")
    _require_number(params.get("top_p", 1.0), "sampling_params.top_p", "above 0 and at most 1")
    top_k = params.get("top_k", -1)
    if type(top_k) is not int or top_k != -1:
        _require_integer(top_k, "sampling_params.top_k", low=1, hint=", or -1 for off")
    if "seed" in params:
        _require_integer(params["seed"], "sampling_params.seed", low=0, hint="; leave it out for none")
    if "stop" in params and params["stop"] != []:
        _check_token_ids(params["stop"], "sampling_params.stop")


def check_logprobs_request(request: object) -> None:
    """Raise ValueError if the payload of a ``logprobs`` is not ``{"input": {"token_ids": [integers ≥ 0]}}``."""
    request = _require_object(request, "request", ("input",))
    _check_token_ids(_require_object(request["input"], "input", ("token_ids",))["token_ids"], "input.token_ids")


def check_optimizer_payload(payload: object) -> None:
    """Raise ValueError if the payload of an ``optim_step`` breaks the ranges of ``adamw_optimizer``."""
    payload = _require_object(payload, "payload", ("optimizer",))
    optimizer = _require_object(payload["optimizer"], "optimizer", ("type", *_OPTIMIZER_RANGES))
    if optimizer["type"] != "adamw":
        raise ValueError(f"optimizer.type is {_show(optimizer['type'])}, expected 'adamw'")
    for name, expected in _OPTIMIZER_RANGES.items():
        _require_number(optimizer[name], f"optimizer.{name}", expected)


def _check_datum(datum: object, where: str, loss_function: str, required: frozenset[str], provider: str) -> None:
    datum = _require_object(datum, where, ("input", "loss_inputs"))
    token_ids = _require_object(datum["input"], f"{where}.input", ("token_ids",))["token_ids"]
    _check_token_ids(token_ids, f"{where}.input.token_ids")
    inputs = f"{where}.loss_inputs"
    tensors = _require_object(datum["loss_inputs"], inputs, (), _KNOWN_TENSORS)
    for name in sorted(required - tensors.keys()):
        raise ValueError(f"{inputs}.{name} is missing; {loss_function} needs {', '.join(sorted(required))}")
    for name in sorted(_CLIP_TENSORS & tensors.keys()):
        if provider != "tinker":
            instead = f" and send loss_config {{{name!r}: …}}" if name in LOSS_CONFIG_KEYS[loss_function] else ""
            raise ValueError(
                f"{inputs}.{name} is a tensor that only tinker takes; on {provider} build the datum without it{instead}"
            )
    for name, value in tensors.items():
        _check_tensor(value, f"{inputs}.{name}", "int64" if name == "target_tokens" else "float32", len(token_ids))
    weights = tensors["weights"]["values"]
    for name, (low, high, message) in _WEIGHTED_RANGES.items():
        if name not in tensors:
            continue
        numbers = tensors[name]["values"]
        if max(numbers) <= high and (low == -math.inf or low <= min(numbers)):
            continue  # the whole list is checked at once first, which is fast
        for index, (number, weight) in enumerate(zip(numbers, weights, strict=True)):
            if weight != 0 and not low <= number <= high:
                raise ValueError(f"{inputs}.{name}.values[{index}] is {number!r}, {message}")


def _check_tensor(value: object, where: str, dtype: str, length: int) -> None:
    value = _require_object(value, where, ("dtype", "shape", "values"))
    if value["dtype"] != dtype:
        raise ValueError(f"{where}.dtype is {_show(value['dtype'])}, expected {dtype!r}")
    numbers = value["values"]
    if not isinstance(numbers, list):
        raise ValueError(f"{where}.values is {_show(numbers)}, expected a list of {length} numbers")
    if len(numbers) != length:
        raise ValueError(
            f"{where}.values has {len(numbers)} entries, but input.token_ids has {length}; "
            "every tensor of a datum has one entry per input token (prompt + completion - 1)"
        )
    shape = value["shape"]
    if shape != [length] or type(shape[0]) is not int:
        shown = f"[{_show(shape[0])}]" if isinstance(shape, list) and len(shape) == 1 else _show(shape)
        raise ValueError(f"{where}.shape is {shown}, expected [{length}]")
    if dtype == "int64":
        _check_token_ids(numbers, f"{where}.values")
        return
    # First check the whole list at once, which is fast: no entry is larger than the root of the sum of squares, which
    # is NaN if one entry is.
    if set(map(type, numbers)) <= {float} and math.hypot(*numbers) <= _FLOAT32_MAX:
        return
    for index, number in enumerate(numbers):
        _require_number(number, f"{where}.values[{index}]")


def _check_token_ids(token_ids: object, where: str) -> None:
    token_ids = _require_list(token_ids, where, "token id")
    # First check the whole list at once, which is fast.
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) <= _INT64_MAX:
        return
    for index, token in enumerate(token_ids):
        if type(token) is not int or not 0 <= token <= _INT64_MAX:
            raise ValueError(f"{where}[{index}] is {_show(token)}, expected a token id: an integer of at least 0")


def _require_object(
    value: object, where: str, required: Sequence[str], optional: Collection[str] = ()
) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {_show(value)}, expected an object")
    for name in required:
        if name not in value:
            raise ValueError(f"{where}.{name} is missing")
    for name in value:
        if name not in required and name not in optional:
            known = ", ".join([*required, *sorted(optional)])
            raise ValueError(f"{where}.{name} is not a known field; known: {known}")
    return value


def _require_list(value: object, where: str, entry: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where} is {_show(value)}, expected a list of at least one {entry}")
    return value


def _require_integer(value: object, where: str, *, low: int, hint: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= _INT64_MAX:
        raise ValueError(f"{where} is {_show(value)}, expected an integer from {low} to 2^63 − 1{hint}")


def _require_number(value: object, where: str, bounds: str | None = None) -> None:
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    if not abs(number) <= _FLOAT32_MAX or (bounds and not _RANGES[bounds](number)):
        expected = "a finite number within float32" + (f", {bounds}" if bounds else "")
        raise ValueError(f"{where} is {_show(value)}, expected {expected}")


def _plain(value: Any) -> Any:
    """Return a numpy or torch scalar (they have ``item``) as a Python number, and anything else unchanged."""
    try:
        return value.item()
    except (AttributeError, ValueError, RuntimeError):  # not such a scalar, or an array of several
        return value


def _plain_list(values: Any) -> Any:
    """Return a list of such numbers from a sequence, range or array, and anything else unchanged."""
    values = values.tolist() if hasattr(values, "tolist") else values
    return [_plain(value) for value in values] if isinstance(values, Iterable) else values


def _show(value: object) -> str:
    """Return a short description of the value."""
    if isinstance(value, int) and value.bit_length() > 64:  # Python does not print thousands of digits
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (dict, list)) and value:
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if value is None or isinstance(value, (bool, int, float, str, dict, list)):
        return reprlib.repr(value)
    return f"of type {type(value).__name__}"
