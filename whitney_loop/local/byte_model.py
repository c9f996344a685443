"""The embedded model: a language model of bytes with a low-rank adapter, in plain Python.

Tokens are the bytes 0–255, and 256 for the end of a text. The next token depends on the last two, prev and cur::

    logits = base[cur] + alpha/rank · B·h,  h = A[prev] + A[257 + cur];  at the first position h = A[257 + cur]

``base`` is a frozen bigram table. The rest is a LoRA on a linear layer with 514 one-hot inputs (prev, then cur) and
257 outputs: A has a row of ``rank`` numbers for each input, B one for each output. B starts at zero, so training
starts at the base model. With LoRA's scale alpha/rank, one learning rate serves every rank.
The critic of ``ppo_critic`` has one number for each input, which starts at zero: v = head[prev] + head[257 + cur].
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
"""The inputs that are 1, which are the rows of A to add: (257 + cur,) at the first position, else (prev, 257 + cur)."""

Slopes = dict[Context, dict[int, float]]
"""d loss / d logprob, summed for each context and target."""

Choices = tuple[Sequence[int], Sequence[float]]
"""The tokens that may be drawn, and their cumulative weights."""

Polar = tuple[float, tuple[float, ...]]
"""A vector as its length and its direction, a vector of length 1."""

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

# The base mixes three distributions: of the tokens that follow this byte in the text, of all tokens in the text, and
# of any token at all. The last one keeps every logprob above −9 and leaves a rehearsal something to explore. With a
# larger share of it each cycle is slower, because the cost grows with the number of distinct tokens.
_BIGRAM_SHARE, _UNIGRAM_SHARE, _UNIFORM_SHARE = 0.80, 0.16, 0.04

# With these two and AdamW at learning rate 0.1, a simple reward is learned in 20 to 30 steps at every rank. That is
# slow enough to watch, and four updates on one sample do not yet make the model repeat one text.
LORA_ALPHA = 2
_INITIAL_DEVIATION = 0.5  # standard deviation of the entries of A

CACHED_CONTEXTS = 2048  # 4 kB each, so at most 8 MB for a version; a cycle of some hundred tokens needs far fewer


def number_of_weights(rank: int) -> int:
    """Return the number of entries of A, B and the value head together."""
    return (INPUTS + VOCABULARY) * rank + INPUTS


def initial_weights(rank: int, seed: int | str) -> list[float]:
    """Return new weights: A drawn from ``seed``, B and the value head zero."""
    rng = random.Random(f"{seed}:adapter")
    a = [rng.gauss(0.0, _INITIAL_DEVIATION) for _ in range(INPUTS * rank)]
    return a + [0.0] * (number_of_weights(rank) - len(a))


class Policy:
    """The weights of one version, which never change, and a cache of results that were computed from them.

    ``weights`` is one flat list: A, with a row of ``rank`` numbers for each input; then B, with such a row for each
    token; then the value head, with one number for each input.
    """

    def __init__(self, weights: list[float], rank: int) -> None:
        self.weights = weights
        self._rank = rank
        self._scale = LORA_ALPHA / rank
        self.clear_cache()

    def clear_cache(self) -> None:
        """Free the memory of the cache. A sampler may keep an old version for long, and is seldom asked."""
        self._b_rows: list[Polar] = []
        self._row_logits: dict[int, list[float]] = {}
        self._logprobs: dict[Context, array[float]] = {}
        self._choices: dict[tuple[float, ...], dict[Context, Choices]] = {}

    @property
    def a(self) -> list[list[float]]:
        """Return the 514 rows of A."""
        return [self._row(row) for row in range(INPUTS)]

    @property
    def b(self) -> list[list[float]]:
        """Return the 257 rows of B."""
        return [self._row(row) for row in range(INPUTS, INPUTS + VOCABULARY)]

    def _row(self, row: int) -> list[float]:
        """Return a row of A (0 to 513) or of B (514 to 770)."""
        return self.weights[row * self._rank : (row + 1) * self._rank]

    def logprobs(self, context: Context) -> Sequence[float]:
        """Return the logprob of each of the 257 tokens that may come next.

        Raise EngineError ``non_finite_logits`` if the weights are so large that the logits overflow.
        """
        if context in self._logprobs:
            return self._logprobs[context]
        logits = self._logits(context[-1])
        for prev in context[:-1]:
            logits = list(map(add, logits, self._logits(prev)))
        if not math.isfinite(sum(logits)):
            raise EngineError("non_finite_logits", "the weights have grown so large that the logits overflow")
        top = max(logits)  # subtracted, so that exp cannot overflow
        log_total = top + math.log(sum([math.exp(x - top) for x in logits]))
        result = array("d", [x - log_total for x in logits])
        _keep(self._logprobs, context, result)
        return result

    def choices(self, params: Mapping[str, float]) -> Callable[[Context], Choices]:
        """Return a function from a context to its ``Choices``; its results are cached for equal ``params``."""
        temperature = params.get("temperature", 1.0)
        top_k, top_p = params.get("top_k", -1), params.get("top_p", 1.0)
        kept = self._choices.setdefault((temperature, top_k, top_p), {})

        def choices(context: Context) -> Choices:
            if context not in kept:
                _keep(kept, context, choices_of(self.logprobs(context), temperature, int(top_k), top_p))
            return kept[context]

        return choices

    def _logits(self, row: int) -> list[float]:
        """Return what one input adds to the logits: alpha/rank · B·A[row], plus base[cur] if the input is cur."""
        if row not in self._row_logits:
            self._b_rows = self._b_rows or to_polar(self.b)
            logits = dot_products([self._scale * x for x in self._row(row)], self._b_rows)
            is_current = row >= VOCABULARY
            self._row_logits[row] = list(map(add, base_logprobs(row - VOCABULARY), logits)) if is_current else logits
        return self._row_logits[row]

    def value(self, context: Context) -> float:
        """Return the critic's value of a context. Raise EngineError ``non_finite_values`` if it overflows."""
        value = sum([self.weights[row - INPUTS] for row in context])  # the head is the last INPUTS weights
        if not math.isfinite(value):
            raise EngineError("non_finite_values", "the value head has grown so large that a value overflows")
        return value

    def adapter_gradient(self, slopes: Slopes) -> list[float]:
        """Return d loss / d A and d loss / d B in one flat list.

        For one context, d loss / d logits = Σ over targets of slope·(onehot − softmax). An input's d_logits is the sum
        of this over the contexts that contain the input, times alpha/rank. Then::

            d loss / d A[row] = Bᵀ · d_logits[row],  d loss / d B = Σ over rows of d_logits[row] · A[row]ᵀ

        Products with A and B are taken once for each input, not for each context or token, which is much faster.
        """
        if not slopes:
            return [0.0] * (len(self.weights) - INPUTS)
        terms: defaultdict[int, list[list[float]]] = defaultdict(list)  # of d_logits
        for context, of_targets in slopes.items():
            total = self._scale * sum(of_targets.values())
            term = [-total * p for p in map(math.exp, self.logprobs(context))]
            for target, slope in of_targets.items():
                term[target] += self._scale * slope
            for row in context:
                terms[row].append(term)
        d_logits = {row: [sum(column) for column in zip(*of_row, strict=True)] for row, of_row in terms.items()}
        b_columns = to_polar(zip(*self.b, strict=True))
        d_a = [[0.0] * self._rank] * INPUTS
        for row, d in d_logits.items():
            d_a[row] = dot_products(d, b_columns)
        a_columns = to_polar(zip(*map(self._row, d_logits), strict=True))
        d_b = [dot_products(column, a_columns) for column in zip(*d_logits.values(), strict=True)]
        return flat(d_a) + flat(d_b)


def to_polar(vectors: Iterable[Sequence[float]]) -> list[Polar]:
    """Return the length and the direction of each vector, for ``dot_products``."""
    return [(length := math.hypot(*vector), tuple([x / (length or 1.0) for x in vector])) for vector in vectors]


def dot_products(vector: Sequence[float], others: Sequence[Polar]) -> list[float]:
    """Return the dot product of ``vector`` with each of ``others``.

    It is |v|·|w|·cos, and the cosine of two directions is 1 − distance²/2. ``math.dist`` is the only loop over two
    vectors that is written in C in every supported Python. So this is three to five times as fast as summing products
    in Python, and as exact.
    """
    ((length, direction),) = to_polar([vector])
    return [length * other * (1 - (gap := math.dist(direction, towards)) * gap / 2) for other, towards in others]


def folded(token_ids: Iterable[int]) -> list[int]:
    """Return token ids of this model. Larger ids come from another tokenizer and are folded onto bytes."""
    return [token if token <= END else token % 256 for token in token_ids]


def contexts_of(tokens: Sequence[int]) -> list[Context]:
    """Return the context that ends in each token, on which the next token depends."""
    first = [(VOCABULARY + cur,) for cur in tokens[:1]]
    return [*first, *((prev, VOCABULARY + cur) for prev, cur in pairwise(tokens))]


def choices_of(logprobs: Sequence[float], temperature: float, top_k: int, top_p: float) -> Choices:
    """Return the tokens that may be drawn, and their cumulative weights.

    ``temperature`` is applied first (0: only the likeliest token), then ``top_k`` (−1: off), then ``top_p``, which
    keeps the fewest tokens that together have at least this share.
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
    """Add a result to a cache, which is emptied when it is full."""
    if len(cache) >= CACHED_CONTEXTS:
        cache.clear()
    cache[context] = result


@functools.cache
def base_logprobs(cur: int) -> list[float]:
    """Return the frozen logprobs of the tokens after ``cur``: counts in the base text, smoothed to exclude no token."""
    pairs, singles = _counts()
    total = singles.total()
    unigram = [singles[token] / total for token in range(VOCABULARY)]
    seen = singles[cur]  # each token is as often the first of a pair as the second, see _counts
    bigram = [pairs[cur, token] / seen for token in range(VOCABULARY)] if seen else unigram
    return [
        math.log(_BIGRAM_SHARE * two + _UNIGRAM_SHARE * one + _UNIFORM_SHARE / VOCABULARY)
        for two, one in zip(bigram, unigram, strict=True)
    ]


@functools.cache
def _counts() -> tuple[Counter[tuple[int, int]], Counter[int]]:
    """Return how often each pair of tokens and each token occur in the base text."""
    lines = [[*line.encode(), END] for line in _BASE_TEXT.splitlines()]
    tokens = [END, *flat(lines)]  # an END also before the first line, so that every line begins after an END
    return Counter(pairwise(tokens)), Counter(tokens[1:])


def flat(rows: Iterable[Iterable[Number]]) -> list[Number]:
    """Return the entries of all rows in one list."""
    return list(chain.from_iterable(rows))
