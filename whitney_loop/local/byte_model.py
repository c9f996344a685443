"""The embedded model: bytes in, bytes out, with a low-rank adapter, in plain Python.

Tokens are the bytes 0–255 and 256, the end. The distribution of the next token depends on the last two::

    logits = base[cur] + alpha/rank · B·h,  h = A[prev] + A[257 + cur];  at the first position h = A[257 + cur]

``base`` is a frozen bigram table. The rest is exactly a LoRA on a linear layer with 514 one-hot inputs (prev,
then cur) and 257 outputs: A has a row of ``rank`` numbers per input, B one per output. B starts at zero, so
training starts at the base model. The scale alpha/rank is LoRA's own: one learning rate serves every rank.
The critic of ``ppo_critic`` has one number per input, which starts at zero: v = head[prev] + head[257 + cur].
"""

from __future__ import annotations

import functools
import math
import random
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from operator import add, mul
from typing import TypeVar

from whitney_loop.local.engine import EngineError

END = 256
VOCABULARY = 257
INPUTS = 2 * VOCABULARY

Number = TypeVar("Number", int, float)

Context = tuple[int, ...]
"""The rows of A that are summed: (257 + cur,) at the first position, (prev, 257 + cur) after it."""

Slopes = dict[Context, dict[int, float]]
"""d loss / d logprob, summed per context and target."""

_BASE_TEXT = """\
The ferry leaves at dawn, if the wind drops and the ropes are dry.
The smith brought three bright lamps down from the north shelf.
Then she went left, past the mill, and straight on to the marsh.
Twelve ships with crates of salt came through the strait in March.
The clerk thinks that the clock strikes much too softly at night.
Check both locks first, then switch the last of the lights off.
That spring was dry, and by midsummer the crops had shrunk by a third.
When the sixth cup broke, they bought tin mugs with thick rims.
"""

# Shares of the base: what the text says after this byte, what it says in general, and any token at all. The last one
# keeps every logprob above −9 and leaves a rehearsal something to explore. A larger one makes each cycle slower,
# because the cost grows with the number of distinct tokens.
_BIGRAM_SHARE, _UNIGRAM_SHARE, _UNIFORM_SHARE = 0.80, 0.16, 0.04

# With AdamW at learning rate 0.1 these learn a simple reward in 20 to 30 steps, at every rank: slow enough to watch,
# and four updates on one sample do not yet collapse into one repeated text.
LORA_ALPHA = 2
_INITIAL_DEVIATION = 0.5  # of the entries of A

CACHED_CONTEXTS = 2048  # 2 kB each: at most 4 MB per version; a cycle of some hundred tokens needs far fewer


def number_of_weights(rank: int) -> int:
    """Entries of A and B, then of the value head."""
    return (INPUTS + VOCABULARY) * rank + INPUTS


def initial_weights(rank: int, seed: int | str) -> list[float]:
    """A is drawn from ``seed``; B and the value head are zero."""
    rng = random.Random(f"{seed}:adapter")
    a = [rng.gauss(0.0, _INITIAL_DEVIATION) for _ in range(INPUTS * rank)]
    return a + [0.0] * (number_of_weights(rank) - len(a))


class Policy:
    """The weights of one version, which never change, and a cache of what was computed from them.

    ``a`` is [514][rank], ``b`` is [257][rank], ``head`` is [514]; in a flat list they come in this order.
    """

    def __init__(self, weights: list[float], rank: int) -> None:
        adapter, self.head = weights[:-INPUTS], weights[-INPUTS:]
        rows = [adapter[i : i + rank] for i in range(0, len(adapter), rank)]
        self.a, self.b = rows[:INPUTS], rows[INPUTS:]
        self._scale = LORA_ALPHA / rank
        self._projections: dict[int, array[float]] = {}
        self._logprobs: dict[Context, array[float]] = {}

    def weights(self) -> list[float]:
        return flat(self.a) + flat(self.b) + self.head

    def clear_cache(self) -> None:
        """Free the cache: a sampler keeps an old version, and is seldom asked."""
        self._projections.clear()
        self._logprobs.clear()

    def logprobs(self, context: Context) -> Sequence[float]:
        """Log-probability of each of the 257 next tokens.

        Raises EngineError ``non_finite_logits`` if the weights are so large that the logits overflow.
        """
        if context in self._logprobs:
            return self._logprobs[context]
        logits: Sequence[float] = base_logprobs(context[-1] - VOCABULARY)
        for row in context:
            logits = list(map(add, logits, self._projection(row)))
        if not math.isfinite(sum(logits)):
            raise EngineError("non_finite_logits", "the weights have grown so large that the logits overflow")
        top = max(logits)
        shifted = [x - top for x in logits]  # so that exp cannot overflow
        log_total = math.log(sum(map(math.exp, shifted)))
        if len(self._logprobs) >= CACHED_CONTEXTS:
            self._logprobs.clear()
        result = self._logprobs[context] = array("d", [x - log_total for x in shifted])
        return result

    def _projection(self, row: int) -> array[float]:
        """alpha/rank · B·A[row]: what one input adds to the logits."""
        if row not in self._projections:
            a = [self._scale * x for x in self.a[row]]
            self._projections[row] = array("d", [sum(map(mul, b, a)) for b in self.b])
        return self._projections[row]

    def value(self, context: Context) -> float:
        """The critic's value of a context. Raises EngineError ``non_finite_values`` if it overflows."""
        value = sum(self.head[row] for row in context)
        if not math.isfinite(value):
            raise EngineError("non_finite_values", "the value head has grown so large that a value overflows")
        return value

    def adapter_gradient(self, slopes: Slopes) -> list[float]:
        """d loss / d A and d loss / d B, in one flat list.

        Per context, d loss / d logits = Σ over targets of slope·(onehot − softmax). Times alpha/rank, these are added
        up per row of A first, so that the products with A and B are taken once per row, not once per context or token.
        """
        if not slopes:
            return [0.0] * ((INPUTS + VOCABULARY) * len(self.b[0]))
        d_logits: dict[int, list[float]] = {}
        for context, of_targets in slopes.items():
            total = self._scale * sum(of_targets.values())
            d = [-total * p for p in map(math.exp, self.logprobs(context))]
            for target, slope in of_targets.items():
                d[target] += self._scale * slope
            for row in context:
                d_logits[row] = list(map(add, d_logits[row], d)) if row in d_logits else d
        b_columns = list(zip(*self.b, strict=True))
        d_a = [[0.0] * len(b_columns)] * INPUTS
        for row, d in d_logits.items():
            d_a[row] = [sum(map(mul, column, d)) for column in b_columns]
        a_columns = list(zip(*(self.a[row] for row in d_logits), strict=True))
        d_outputs = zip(*d_logits.values(), strict=True)
        d_b = [[sum(map(mul, column, d)) for column in a_columns] for d in d_outputs]
        return flat(d_a) + flat(d_b)


def folded(token_ids: Iterable[int]) -> list[int]:
    """Tokens of this model; larger ids, of another tokenizer, are folded onto bytes."""
    return [token if 0 <= token <= END else token % 256 for token in token_ids]


def contexts_of(tokens: Sequence[int]) -> list[Context]:
    """For each token, the context that the next token depends on."""
    return [context_of(tokens[max(t - 1, 0) : t + 1]) for t in range(len(tokens))]


def context_of(last_two: Sequence[int]) -> Context:
    """The context that ends in these two tokens, or in this one token at the beginning of a text."""
    *prev, cur = last_two
    return (*prev, VOCABULARY + cur)


def choices_of(logprobs: Sequence[float], params: Mapping[str, float]) -> tuple[list[int], list[float]]:
    """The tokens that may be drawn, and their cumulative weights.

    Temperature comes first (0 = greedy), then top_k (−1 = off), then top_p: the fewest tokens that hold that share.
    """
    temperature = params.get("temperature", 1.0)
    top_k, top_p = params.get("top_k", -1), params.get("top_p", 1.0)
    order = list(range(VOCABULARY))
    if temperature == 0 or top_k > 0 or top_p < 1:
        order.sort(key=logprobs.__getitem__, reverse=True)
    if temperature == 0:
        return order[:1], [1.0]
    if top_k > 0:
        order = order[: int(top_k)]
    top = max(logprobs)
    tempered = [(logprobs[token] - top) / temperature for token in order]
    cumulative = list(accumulate(map(math.exp, tempered)))
    if top_p < 1:
        kept = bisect_left(cumulative, top_p * cumulative[-1]) + 1
        order, cumulative = order[:kept], cumulative[:kept]
    return order, cumulative


@functools.cache
def base_logprobs(cur: int) -> list[float]:
    """The frozen bigram row of one token: text counts, smoothed so that nothing is impossible."""
    pairs, singles = _counts()
    total = singles.total()
    unigram = [singles[token] / total for token in range(VOCABULARY)]
    seen = singles[cur]  # the text is a ring of lines, so each token starts as many pairs as it ends
    bigram = [pairs[cur, token] / seen for token in range(VOCABULARY)] if seen else unigram
    return [
        math.log(_BIGRAM_SHARE * two + _UNIGRAM_SHARE * one + _UNIFORM_SHARE / VOCABULARY)
        for two, one in zip(bigram, unigram, strict=True)
    ]


@functools.cache
def _counts() -> tuple[Counter[tuple[int, int]], Counter[int]]:
    """How often the base text has each pair of tokens, and each token."""
    lines = [[*line.encode(), END] for line in _BASE_TEXT.splitlines()]
    tokens = [END, *flat(lines)]  # with an end before the first line, every line starts after one
    return Counter(pairwise(tokens)), Counter(tokens[1:])


def flat(rows: Iterable[Iterable[Number]]) -> list[Number]:
    return list(chain.from_iterable(rows))
