"""The losses of each provider and the keys of their ``loss_config``: two tables, and two functions that check them.

The tables are from Whitney's documentation (page "Loop building blocks"); the capabilities endpoint has no list of
losses. A check finds a mistake before anything is allocated. Tinker's config keys are this project's reading.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

LOSS_SUPPORT: dict[str, frozenset[str]] = {
    "modal": frozenset({"cross_entropy", "importance_sampling", "ppo", "cispo", "gspo", "ppo_critic", "dppo"}),
    "tinker": frozenset({"cross_entropy", "importance_sampling", "ppo", "cispo", "dro"}),
}

_CLIP_KEYS = frozenset({"clip_low_threshold", "clip_high_threshold"})

LOSS_CONFIG_KEYS: dict[str, frozenset[str]] = {
    "cross_entropy": frozenset(),
    "importance_sampling": frozenset(),
    "ppo": _CLIP_KEYS | {"value_clip"},
    "gspo": _CLIP_KEYS,
    "cispo": _CLIP_KEYS,
    "ppo_critic": frozenset({"value_clip"}),
    "dppo": frozenset({"delta_low", "delta_high"}),
}
"""Modal's keys. A loss with an empty set takes no keys."""

_TINKER_CONFIG_KEYS = {"dro": frozenset({"beta"})}

_FLOAT32_MAX = 3.4028234663852886e38  # also in payloads, so that functions of both can be copied out


def require_advertised_loss(
    provider: str, loss_function: str, support: Mapping[str, Collection[str]] = LOSS_SUPPORT
) -> None:
    """Raise ValueError, with the losses that Whitney forwards to this provider, if this loss is not one of them.

    Call it before anything is allocated. Source: Whitney, "Requiring an advertised loss".
    """
    if not isinstance(provider, str) or provider not in support:
        raise ValueError(f"provider {_name(provider)} is not known; known: {', '.join(sorted(support))}")
    if not isinstance(loss_function, str) or loss_function not in support[provider]:
        raise ValueError(
            f"loss_function {_name(loss_function)} is not advertised by {provider}; it has "
            f"{', '.join(sorted(support[provider]))}. Do not replace one algorithm by another: choose another provider"
        )


def require_loss_config(provider: str, loss_function: str, loss_config: Mapping[str, object]) -> None:
    """Raise ValueError, with the key, if the provider would refuse this ``loss_config``.

    Keys: ``LOSS_CONFIG_KEYS`` on Modal; on Tinker ``beta`` for ``dro`` and nothing else, since clip ranges are
    per-token tensors there. Values: finite numbers; ``clip_low_threshold`` in 0…1 and ``clip_high_threshold``
    ≥ 1, which are ratios and not epsilons; every other key ≥ 0. Source of Modal's keys: Whitney, "Provider loss
    support"; the ranges are this project's reading.
    """
    require_advertised_loss(provider, loss_function)
    if not isinstance(loss_config, Mapping):
        raise ValueError(f"loss_config is {type(loss_config).__name__}, expected an object; {{}} for none")
    keys = _TINKER_CONFIG_KEYS if provider == "tinker" else LOSS_CONFIG_KEYS
    allowed = keys.get(loss_function, frozenset())
    for key, value in loss_config.items():
        if key not in allowed:
            remedy = ""
            if provider == "tinker" and key in _CLIP_KEYS:
                remedy = ". Clip ranges are tensors of the datum there: rl_datum(…, clip_low=…, clip_high=…)"
            known = ", ".join(sorted(allowed)) or "no keys"
            message = f"loss_config.{key!s:.80} is no key of {loss_function} on {provider}; it takes {known}{remedy}"
            raise ValueError(message)
        _require_config_value(key, value)


def _name(value: object) -> str:
    """Return the name, truncated; for a value that is not a string, its type."""
    return f"{value!r:.80}" if isinstance(value, str) else f"of type {type(value).__name__}"


def _require_config_value(key: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"loss_config.{key} is of type {type(value).__name__}, expected a plain number")
    if not abs(value) <= _FLOAT32_MAX:
        raise ValueError(f"loss_config.{key} is not finite, or beyond float32; expected a finite number")
    if value < 0:
        raise ValueError(f"loss_config.{key} is {value!r}, expected a number of at least 0")
    if (key == "clip_low_threshold" and value > 1) or (key == "clip_high_threshold" and value < 1):
        raise ValueError(
            f"loss_config.{key} is {value!r}, but thresholds are ratios around 1, not epsilons: "
            "for an epsilon of 0.2 pass clip_low_threshold 0.8 and clip_high_threshold 1.2"
        )
