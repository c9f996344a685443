"""The report at the end of the contract tests: the sentences that do not hold, and what the tests asked for."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import pytest

from contract.deployment import Api, Deviation, shortened

_WIRE_NAMES = re.compile(
    r"(?<![a-z])(seq_(?:id|gap|conflict)|request_id|sampler_id|loss_config|run_not_active|no_gradients|wait_s|value_clip|"
    r"clip_frac|ppo_critic|optim_step|forward_backward|grad_clip_norm|learning_rate|max_tokens|resume_from)(?![a-z])"
)
_SENTENCE_COLUMN = 46
_FOUND_COLUMN = 68


@dataclass
class Report:
    """The outcome of every test, by its sentence."""

    api: Api | None = None
    held: Counter[str] = field(default_factory=Counter)
    found: dict[tuple[str, str], list[str]] = field(default_factory=dict)  # (mark, sentence) → a line per failed case
    not_asked: Counter[str] = field(default_factory=Counter)  # by the reason

    def add(self, item: pytest.Item, report: pytest.TestReport, error: BaseException | None) -> None:
        sentence = sentence_of(item)
        if report.skipped:
            self.not_asked[str(report.longrepr[2]).removeprefix("Skipped: ")] += 1  # type: ignore[index]
        elif report.failed:
            mark = "doc" if item.get_closest_marker("doc") else "ours"
            case = item.name.partition("[")[2].removesuffix("]")
            text = _words_of(error, self.api.ledger.last if self.api else "")
            self.found.setdefault((mark, sentence), []).append(f"[{case}] {text}" if case else text)
        elif report.when == "call":
            self.held[sentence] += 1

    def lines(self) -> list[str]:
        """Return the lines of the report; none if no contract test ran."""
        asked = self.held.keys() | {sentence for _, sentence in self.found}
        if not asked and not self.not_asked:
            return []
        if self.found:
            lines = [
                f"{len(self.found)} of {len(asked)} sentences of the contract do not hold:",
                "",
                *self._table(),
                "",
            ]
        else:
            lines = [f"All {len(asked)} sentences of the contract that were asked hold, in {self.held.total()} cases."]
        lines += [f"not asked, {count} cases: {reason}" for reason, count in self.not_asked.most_common()]
        if self.api is not None:
            lines += ["What this run asked for:", *(f"  {line}" for line in self.api.ledger.lines())]
            lines += [f"STILL OPEN: {line}" for line in self._open_sessions(self.api)]
        return lines

    def _table(self) -> list[str]:
        rows = [("", "the contract says", "found")]
        for (mark, sentence), found in self.found.items():
            more = [f"and {len(found) - 1} more"] if len(found) > 1 else []
            rows.append((f"[{mark}]", sentence, "; ".join([found[0], *more])))
        return [line for row in rows for line in _row(*row)]

    def _open_sessions(self, api: Api) -> list[str]:
        unknown = [f"a session whose creation got no answer, Idempotency-Key {key}" for key in api.ledger.unanswered]
        return unknown + [
            f"session {session_id}; close it with: python -m whitney_loop close {session_id} --base-url {api.base_url}"
            for session_id in api.ledger.open_sessions
        ]


def sentence_of(item: pytest.Item) -> str:
    """Return a test's name as a sentence: ``test_order.py``, ``test_3_nothing_runs_twice`` → "order 3: nothing …"."""
    name = getattr(item, "originalname", None) or item.name
    number, words = re.fullmatch(r"test_(?:(\d+)_)?(.*)", name).groups()  # type: ignore[union-attr]
    words = _WIRE_NAMES.sub(lambda match: match[1].replace("_", "\0"), words)
    place = item.path.stem.removeprefix("test_") + (f" {number}" if number else "")
    return f"{place}: {words.replace('_', ' ')}".replace("\0", "_")


def _words_of(error: BaseException | None, last_exchange: str) -> str:
    """Return what was found, without a traceback."""
    if isinstance(error, Deviation):
        return shortened(str(error), 260)
    text = str(error)
    if isinstance(error, AssertionError):
        asserted = [line for line in text.splitlines() if line.startswith("assert ")]
        text = asserted[0].removeprefix("assert ") if asserted else text
    else:
        text = f"{type(error).__name__}: {text}"
    return f"{shortened(text, 120)}, after {shortened(last_exchange, 200)}"


def _row(mark: str, sentence: str, found: str) -> list[str]:
    """The lines of a row, wrapped in their columns."""
    columns = (textwrap.wrap(sentence, _SENTENCE_COLUMN), textwrap.wrap(found, _FOUND_COLUMN))
    return [
        f"{mark if number == 0 else '':6} {left or '':{_SENTENCE_COLUMN}}  {right or ''}".rstrip()
        for number, (left, right) in enumerate(zip_longest(*columns))
    ]


KEY: pytest.StashKey[Report] = pytest.StashKey()


def report_of(config: Any) -> Report:
    report: Report = config.stash.setdefault(KEY, Report())
    return report
