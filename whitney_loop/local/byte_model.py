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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from operator import add
from typing import TypeVar

from whitney_loop.local.engine import EngineError

END = 256
VOCABULARY = 257
INPUTS = 2 * VOCABULARY

Number = TypeVar("Number", int, float)
Cached = TypeVar("Cached")

Context = tuple[int, ...]
"""The rows of A that are summed: (257 + cur,) at the first position, (prev, 257 + cur) after it."""

Slopes = dict[Context, dict[int, float]]
"""d loss / d logprob, summed per context and target."""

Choices = tuple[Sequence[int], Sequence[float]]
"""The tokens that may be drawn, and their cumulative weights."""

Polar = tuple[float, tuple[float, ...]]
"""A vector as its length and its direction."""

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

CACHED_CONTEXTS = 2048  # 4 kB each: at most 8 MB per version; a cycle of some hundred tokens needs far fewer


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

    ``weights`` is one flat list: A, a row of ``rank`` numbers per input; B, one per token; then the head, one number
    per input.
    """

    def __init__(self, weights: list[float], rank: int) -> None:
        self.weights = weights
        self._rank = rank
        self._scale = LORA_ALPHA / rank
        self.clear_cache()

    def clear_cache(self) -> None:
        """Free the cache: a sampler keeps an old version, and is seldom asked."""
        self._b_rows: list[Polar] = []
        self._row_logits: dict[int, list[float]] = {}
        self._logprobs: dict[Context, array[float]] = {}
        self._choices: dict[tuple[float, ...], dict[Context, Choices]] = {}

    @property
    def a(self) -> list[list[float]]:
        """[514][rank]"""
        return self._rows(0, INPUTS)

    @property
    def b(self) -> list[list[float]]:
        """[257][rank]"""
        return self._rows(INPUTS, INPUTS + VOCABULARY)

    def _rows(self, begin: int, end: int) -> list[list[float]]:
        return [self.weights[row * self._rank : (row + 1) * self._rank] for row in range(begin, end)]

    def logprobs(self, context: Context) -> Sequence[float]:
        """Log-probability of each of the 257 next tokens.

        Raises EngineError ``non_finite_logits`` if the weights are so large that the logits overflow.
        """
        if context in self._logprobs:
            return self._logprobs[context]
        logits = self._logits(context[-1])
        for prev in context[:-1]:
            logits = list(map(add, logits, self._logits(prev)))
        if not math.isfinite(sum(logits)):
            raise EngineError("non_finite_logits", "the weights have grown so large that the logits overflow")
        top = max(logits)  # taken off, so that exp cannot overflow
        log_total = top + math.log(sum([math.exp(x - top) for x in logits]))
        result = array("d", [x - log_total for x in logits])
        _keep(self._logprobs, context, result)
        return result

    def choices(self, params: Mapping[str, float]) -> Callable[[Context], Choices]:
        """Return the function that gives what may be drawn in a context; its results are kept for equal ``params``."""
        temperature = params.get("temperature", 1.0)
        top_k, top_p = params.get("top_k", -1), params.get("top_p", 1.0)
        kept = self._choices.setdefault((temperature, top_k, top_p), {})

        def choices(context: Context) -> Choices:
            if context not in kept:
                _keep(kept, context, choices_of(self.logprobs(context), temperature, int(top_k), top_p))
            return kept[context]

        return choices

    def _logits(self, row: int) -> list[float]:
        """What one input adds to the logits: alpha/rank · B·A[row], and the base if it is the current token."""
        if row not in self._row_logits:
            self._b_rows = self._b_rows or polars(self.b)
            (a,) = self._rows(row, row + 1)
            logits = products([self._scale * x for x in a], self._b_rows)
            is_current = row >= VOCABULARY
            self._row_logits[row] = list(map(add, base_logprobs(row - VOCABULARY), logits)) if is_current else logits
        return self._row_logits[row]

    def value(self, context: Context) -> float:
        """The critic's value of a context. Raises EngineError ``non_finite_values`` if it overflows."""
        value = sum([self.weights[row - INPUTS] for row in context])
        if not math.isfinite(value):
            raise EngineError("non_finite_values", "the value head has grown so large that a value overflows")
        return value

    def adapter_gradient(self, slopes: Slopes) -> list[float]:
        """d loss / d A and d loss / d B, in one flat list.

        Per context, d loss / d logits = Σ over targets of slope·(onehot − softmax). Times alpha/rank, these are added
        up per row of A first, so that the products with A and B are taken once per row, not once per context or token.
        """
        a, b = self.a, self.b
        d_a, d_b = [[0.0] * self._rank] * INPUTS, [[0.0] * self._rank] * VOCABULARY
        by_row: defaultdict[int, list[list[float]]] = defaultdict(list)
        for context, of_targets in slopes.items():
            total = self._scale * sum(of_targets.values())
            d = [-total * p for p in map(math.exp, self.logprobs(context))]
            for target, slope in of_targets.items():
                d[target] += self._scale * slope
            for row in context:
                by_row[row].append(d)
        if by_row:
            d_logits: dict[int, list[float]] = {}
            for row, ds in by_row.items():
                d_logits[row] = [sum(of_token) for of_token in zip(*ds, strict=True)]
            b_columns = polars(zip(*b, strict=True))
            for row, d in d_logits.items():
                d_a[row] = products(d, b_columns)
            a_columns = polars(zip(*(a[row] for row in d_logits), strict=True))
            d_b = [products(d_output, a_columns) for d_output in zip(*d_logits.values(), strict=True)]
        return flat(d_a) + flat(d_b)


def polars(vectors: Iterable[Sequence[float]]) -> list[Polar]:
    """Each vector as its length and its direction, a vector of length 1."""
    return [(length := math.hypot(*vector), tuple([x / (length or 1.0) for x in vector])) for vector in vectors]


def products(vector: Sequence[float], others: Sequence[Polar]) -> list[float]:
    """The dot product of a vector with each of the others, which ``polars`` made.

    It is |v|·|w|·cos, and the cosine of two directions is 1 − distance²/2. ``math.dist`` is the one loop over two
    vectors that every supported Python has in C: three to five times as fast as summing products in Python, and as
    exact.
    """
    ((length, direction),) = polars([vector])
    return [length * other * (1 - (gap := math.dist(direction, towards)) * gap / 2) for other, towards in others]


def folded(token_ids: Iterable[int]) -> list[int]:
    """Tokens of this model; larger ids, of another tokenizer, are folded onto bytes."""
    return [token if 0 <= token <= END else token % 256 for token in token_ids]


def contexts_of(tokens: Sequence[int]) -> list[Context]:
    """For each token, the context that the next token depends on."""
    pairs = zip(tokens, [VOCABULARY + cur for cur in tokens[1:]], strict=False)
    return [*map(context_of, [tokens[:1]] if tokens else []), *pairs]


def context_of(last_two: Sequence[int]) -> Context:
    """The context that ends in these two tokens, or in this one token at the beginning of a text."""
    *prev, cur = last_two
    return (*prev, VOCABULARY + cur)


def choices_of(logprobs: Sequence[float], temperature: float, top_k: int, top_p: float) -> Choices:
    """The tokens that may be drawn, and their cumulative weights.

    Temperature comes first (0 = greedy), then top_k (−1 = off), then top_p: the fewest tokens that hold that share.
    """
    tokens: Sequence[int] = range(VOCABULARY)
    if temperature == 0 or top_k > 0 or top_p < 1:
        tokens = sorted(tokens, key=logprobs.__getitem__, reverse=True)
    if temperature == 0:
        return tokens[:1], [1.0]
    if top_k > 0:
        tokens = tokens[:top_k]
    if temperature != 1:
        top = max(logprobs)
        logprobs = [(x - top) / temperature for x in logprobs]
    cumulative = array("d", accumulate([math.exp(logprobs[token]) for token in tokens]))
    if top_p < 1:
        kept = bisect_left(cumulative, top_p * cumulative[-1]) + 1
        tokens, cumulative = tokens[:kept], cumulative[:kept]
    return tokens, cumulative


def _keep(cache: dict[Context, Cached], context: Context, result: Cached) -> None:
    if len(cache) >= CACHED_CONTEXTS:
        cache.clear()
    cache[context] = result


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
