"""The samples as texts for people: three of a cycle on stderr, and the lines of ``--samples``."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from whitney_loop.loop.metrics import Payload, plain
from whitney_loop.loop.report import cut, say, terminal_columns
from whitney_loop.loop.training import Training

PROMPT_CHARACTERS = 24  # in a line: the end of the prompt, which tells prompts apart

Decode = Callable[[Sequence[int]], str]


@dataclass
class Completion:
    """One completion, as a line of the file of samples holds it."""

    cycle: int
    group: int  # the index of its request in the cycle
    prompt: list[int]
    tokens: list[int]
    stop_reason: Any
    metadata: Any  # of the request
    reward: float | None = None
    advantage: float | None = None  # the mean over its tokens; None if it was not trained on
    prompt_text: str | None = None
    text: str | None = None

    @property
    def value(self) -> float | None:
        """The number that ranks completions: the reward, or the advantage if no reward is known."""
        return self.advantage if self.reward is None else self.reward


def completions_of(cycle: int, requests: Sequence[Payload], samples: Sequence[Payload]) -> list[Completion]:
    """Return the completions of a cycle, group by group. Call it before build_loss, which may change the samples."""
    return [
        Completion(
            cycle,
            group,
            request["prompt"]["token_ids"],
            list(sequence["tokens"]),
            sequence.get("stop_reason"),
            request.get("metadata"),
        )
        for group, (request, sample) in enumerate(zip(requests, samples, strict=True))
        for sequence in sample["sequences"]
    ]


def add_rewards(completions: Sequence[Completion], metrics: Iterable[object], known: Iterable[float | None]) -> None:
    """Add the rewards that build_loss, called for each group or once for all, left in ``ctx.metrics``.

    Completions without a reward there, as after a resampling, get the ``known`` one, from ``--reward``.
    """
    rewards = [_rewards(of_call) for of_call in metrics]
    groups = _groups(completions)
    for group, of_group in zip([completions] if len(rewards) == 1 else groups, rewards, strict=False):
        if len(group) == len(of_group):
            for completion, reward in zip(group, of_group, strict=True):
                completion.reward = reward
    for completion, given in zip(completions, known, strict=True):
        completion.reward = given if completion.reward is None else completion.reward


def _rewards(metrics: object) -> list[float]:
    try:
        rewards = plain(metrics.get("reward")) if isinstance(metrics, dict) else None
    except Exception:  # whatever the user's objects raise; the metrics report it
        return []
    return rewards if isinstance(rewards, list) else []


def add_advantages(completions: Sequence[Completion], payload: Payload | None) -> None:
    """Add the advantages of the data that are made of the same tokens: prompt and completion."""
    known: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for datum in payload["data"] if payload else []:
        tensors = datum["loss_inputs"]
        if "advantages" in tensors:
            trained = list(itertools.compress(tensors["advantages"]["values"], tensors["weights"]["values"]))
            tokens = (*datum["input"]["token_ids"], tensors["target_tokens"]["values"][-1])
            known[tokens].append(trained[0] if len(set(trained)) == 1 else fmean(trained or [0.0]))
    for completion in completions:
        if of_tokens := known.get((*completion.prompt, *completion.tokens)):
            completion.advantage = of_tokens.pop(0)


class Texts:
    """Prints and stores the completions of the cycles. If ``decode`` fails, only the texts are missing."""

    def __init__(
        self, training: Training, decode: Decode | None, *, show_every: int | None, per_group: int | None
    ) -> None:
        self._training = training
        self._decode = decode or training.decode
        self._show_every = show_every
        self._per_group = per_group
        self._prompt_text = functools.lru_cache(maxsize=1)(self._text)  # the completions of a group share it

    def keep(self, completions: Sequence[Completion]) -> None:
        """Write the completions, or the best and worst of each group, to the file of samples, if there is one."""
        if self._training.samples.path is None:
            return
        kept = [one for group in _groups(completions) for one in best_and_worst(group, self._per_group)]
        for completion in kept:
            self._add_text(completion)
        self._training.samples.write(*map(vars, kept))

    def show(self, completions: Sequence[Completion]) -> None:
        """Print the best, the median and the worst completion, one line each, if it is the turn of this cycle."""
        cycle = completions[0].cycle
        if not self._training.is_first_or_last(cycle) and (self._show_every is None or cycle % self._show_every):
            return
        ranked = sorted(completions, key=_rank, reverse=True)
        chosen = {"best": ranked[0], "median": ranked[len(ranked) // 2], "worst": ranked[-1]}
        if all(completion.value is None for completion in ranked):
            chosen = {"sample": ranked[0]}
        for name, completion in chosen.items():
            self._add_text(completion)
            value = "" if completion.value is None else f"{completion.value:.4g}"
            prompt = _shown(completion.prompt, completion.prompt_text)[-PROMPT_CHARACTERS:]
            line = f"  {name:6}  {value:<7}  {prompt} → {_shown(completion.tokens, completion.text)}"
            say(cut(line, terminal_columns()))

    def _add_text(self, completion: Completion) -> None:
        completion.prompt_text = self._prompt_text(tuple(completion.prompt))
        completion.text = self._text(completion.tokens)

    def _text(self, tokens: Sequence[int]) -> str | None:
        if self._decode is None:
            return None
        try:
            text = self._decode(list(tokens))
            if not isinstance(text, str):
                raise TypeError(f"it returned {type(text).__name__}, expected str")
        except Exception as error:  # whatever the user's function raises: the training goes on
            problem = f"decode raised {type(error).__name__}: {error}; its texts are left out, token ids are shown"
            self._training.warnings.once("decode", problem)
            return None
        return text


def _shown(tokens: Sequence[int], text: str | None) -> str:
    return " ".join(map(str, tokens)) if text is None else text


def _rank(completion: Completion) -> float:
    return 0.0 if completion.value is None else completion.value


def best_and_worst(group: Sequence[Completion], count: int | None) -> list[Completion]:
    """Return ``count`` of the group, in its order: the best, the worst, the second best, the second worst and so on."""
    if count is None or count >= len(group):
        return list(group)
    ranked = sorted(range(len(group)), key=lambda index: _rank(group[index]))
    chosen = [ranked.pop(-1 if turn % 2 == 0 else 0) for turn in range(count)]
    return [group[index] for index in sorted(chosen)]


def _groups(completions: Sequence[Completion]) -> list[list[Completion]]:
    groups: Mapping[int, list[Completion]] = defaultdict(list)
    for completion in completions:
        groups[completion.group].append(completion)
    return list(groups.values())
