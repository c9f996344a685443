"""The embedded engine: a byte-level language model with a low-rank adapter, in plain Python.

Tokens are the bytes 0–255 and 256, the end. The distribution of the next token depends on the last two::

    logits = base[cur] + alpha/rank · B·h,  h = A[prev] + A[257 + cur];  at the first position h = A[257 + cur]

``base`` is a frozen bigram table. The rest is exactly a LoRA on a linear layer with 514 one-hot inputs (prev,
then cur) and 257 outputs: A has a row of ``rank`` numbers per input, B one per output. B starts at zero, so
training starts at the base model. The scale alpha/rank is LoRA's own: it makes one learning rate serve every rank.
The critic of ``ppo_critic`` has one number per input, which start at zero: v = head[prev] + head[257 + cur].

Weights are never changed in place: a step makes a new ``_Policy``, and a sampler keeps the one it was made with.
Sampler and trainer read the same ``_Policy.logprobs``, so on the same version their logprobs are equal.
"""

from __future__ import annotations

import functools
import json
import math
import os
import random
import tempfile
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from operator import add, mul
from pathlib import Path
from typing import TypeVar

from whitney_loop.local import safetensors
from whitney_loop.local.engine import EngineError, JSONObject
from whitney_loop.local.objectives import CLIPPING, OBJECTIVES, evaluate
from whitney_loop.local.safetensors import Tensor

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

# Shares of the base: what the text says after this byte, what it says in general, and anything at all. The last
# keeps every logprob above −9 and leaves a rehearsal something to explore; larger, each cycle gets slower, since its
# cost grows with the number of distinct tokens.
_BIGRAM_SHARE, _UNIGRAM_SHARE, _UNIFORM_SHARE = 0.80, 0.16, 0.04

# With AdamW at learning rate 0.1 these reach a simple reward in 20 to 30 steps, at every rank: slow enough to watch,
# and four updates on one sample still do not collapse into a single repeated text.
_LORA_ALPHA = 2
_INITIAL_DEVIATION = 0.5  # of the entries of A

_CACHED_CONTEXTS = 2048  # 2 kB each: at most 4 MB per version; a cycle of some hundred tokens needs far fewer

_STATE_FORMAT = "whitney-loop byte_lm 2"  # another number whenever the base text or the layout changes


class ByteLM:
    """One run's model, gradients and optimizer; an ``Engine``.

    ``rank``: columns of the adapter, 1 or more. ``seed`` decides the initial A, and nothing else. Memory: 25 kB
    per rank for each version that a sampler keeps, 75 kB per rank for moments and gradients, and little for the head.
    Raises ValueError where ``rank`` is below 1.
    """

    losses = frozenset(OBJECTIVES)

    def __init__(self, rank: int, seed: int | str) -> None:
        if rank < 1:
            raise ValueError(f"rank must be at least 1, not {rank}")
        rng = random.Random(f"{seed}:adapter")
        weights = [rng.gauss(0.0, _INITIAL_DEVIATION) for _ in range(INPUTS * rank)]
        weights += [0.0] * (VOCABULARY * rank + INPUTS)
        self._rank = rank
        self._policy = _Policy(weights, rank)
        self._moment1 = [0.0] * len(weights)
        self._moment2 = [0.0] * len(weights)
        self._gradient: list[float] | None = None
        self._step = 0

    def forward(self, payload: JSONObject) -> JSONObject:
        """``{"loss", "metrics", "outputs"}``; changes nothing.

        Outputs of ``ppo_critic`` have ``values`` as well, value i from inputs i − 1 and i. Its data may come without
        ``values`` and ``returns``; such a datum adds nothing to the loss, which is 0.0 where all are like that.
        Raises EngineError ``non_finite_loss`` where the loss is NaN or infinite.
        """
        return self._evaluate(payload)[0]

    def forward_backward(self, payload: JSONObject) -> JSONObject:
        """As ``forward``, and adds the gradient to what is accumulated.

        Raises EngineError ``non_finite_loss`` where loss or gradient is NaN or infinite; then nothing is added.
        """
        result, slopes, d_head = self._evaluate(payload)
        gradient = self._policy.adapter_gradient(slopes) + d_head
        if self._gradient is not None:
            gradient = list(map(add, self._gradient, gradient))
        if not all(map(math.isfinite, gradient)):
            raise EngineError("non_finite_loss", "the gradient is not finite; nothing was accumulated")
        self._gradient = gradient
        return result

    def _evaluate(self, payload: JSONObject) -> tuple[JSONObject, Slopes, list[float]]:
        """The result, d loss / d logprobs, and d loss / d head."""
        loss_function, config = payload["loss_function"], payload.get("loss_config", {})
        trains_head = loss_function == "ppo_critic"
        loss, clipped, counted = 0.0, 0, 0
        outputs = []
        slopes: Slopes = {}
        d_head = [0.0] * INPUTS
        for index, datum in enumerate(payload["data"]):
            tensors = {name: tensor["values"] for name, tensor in datum["loss_inputs"].items()}
            targets = _folded(tensors["target_tokens"])
            contexts = _contexts(_folded(datum["input"]["token_ids"]))
            p = [self._policy.logprobs(context)[target] for context, target in zip(contexts, targets, strict=True)]
            output = {"logprobs": p}
            if trains_head:
                output["values"] = [self._policy.value(context) for context in contexts]
            outcome = evaluate(loss_function, output["values"] if trains_head else p, tensors, config)
            loss += outcome.loss
            if not math.isfinite(loss):
                raise EngineError("non_finite_loss", f"the loss is {loss} at data[{index}]; nothing was changed")
            clipped += outcome.clipped
            counted += outcome.counted
            outputs.append(output)
            if trains_head:
                _add_to_head(d_head, contexts, outcome.slopes)
            else:
                _add_to_slopes(slopes, contexts, targets, outcome.slopes)
        metrics = {"loss:sum": loss}
        if loss_function in CLIPPING:
            metrics["clip_frac"] = clipped / counted if counted else 0.0
        return {"loss": loss, "metrics": metrics, "outputs": outputs}, slopes, d_head

    def optim_step(self, optimizer: JSONObject) -> JSONObject:
        """One AdamW step (decoupled decay, 1711.05101); ``{"step", "grad_norm"}``, the norm before clipping.

        Raises EngineError ``no_gradients`` where nothing was accumulated since the last step, and
        ``non_finite_update`` where a weight or moment would overflow; then all stays, gradients included.
        """
        if self._gradient is None:
            raise EngineError("no_gradients", "optim_step needs a forward_backward since the last step")
        gradient = self._gradient
        norm = math.hypot(*gradient)
        limit = optimizer["grad_clip_norm"]
        if 0 < limit < norm:
            gradient = [g * (limit / norm) for g in gradient]
        try:
            weights, moment1, moment2 = _adamw(
                self._policy.weights(), gradient, self._moment1, self._moment2, self._step + 1, optimizer
            )
        except ZeroDivisionError:
            raise EngineError("non_finite_update", "the update divides by zero; use an eps above 0") from None
        if not all(map(math.isfinite, chain([norm], weights, moment2))):
            raise EngineError("non_finite_update", f"the step overflows (grad_norm {norm}); nothing was changed")
        self._policy.forget()
        self._policy = _Policy(weights, self._rank)
        self._moment1, self._moment2 = moment1, moment2
        self._gradient = None
        self._step += 1
        return {"step": self._step, "grad_norm": norm}

    def sampler(self) -> ByteLMSampler:
        """The weights as they are, frozen. Costs nothing, since weights are never changed in place."""
        return ByteLMSampler(self._policy, self._step)

    def save_state(self, path: Path) -> int:
        """Write weights, moments and step to the file ``path`` (its folder must exist), whole or not at all.

        Numbers are kept exactly. Gradients that wait for a step are not part of a state. Returns the step.
        """
        parts = {"weights": self._policy.weights(), "moment1": self._moment1, "moment2": self._moment2}
        tensors = {name: Tensor("F64", [len(values)], values) for name, values in parts.items()}
        content = safetensors.encode(tensors, {"format": _STATE_FORMAT, "step": str(self._step)})
        with _draft_of(path) as drafts:
            draft = Path(drafts) / path.name
            _write(draft, content)
            draft.replace(path)
        return self._step

    def load_state(self, path: Path) -> None:
        """Take weights, moments and step from a file of ``save_state``; waiting gradients are dropped.

        Raises ValueError where the file is damaged, of another format or of another rank; then nothing changes.
        """
        tensors, metadata = safetensors.decode(path.read_bytes())
        if metadata.get("format") != _STATE_FORMAT:
            raise ValueError(f"{path}: format {metadata.get('format')!r}; expected {_STATE_FORMAT!r}")
        step = metadata.get("step", "")
        if not (step.isascii() and step.isdigit()):
            raise ValueError(f"{path}: step {step!r} is not a count")
        weights, moment1, moment2 = (
            _state_values(path, tensors, name, self._rank) for name in ("weights", "moment1", "moment2")
        )
        self._policy.forget()
        self._policy = _Policy(weights, self._rank)
        self._moment1, self._moment2 = moment1, moment2
        self._gradient = None
        self._step = int(step)

    def export_lora(self, folder: Path, *, base_model: str) -> None:
        """Write ``folder`` (it must not exist, its parent must) as a PEFT adapter, whole or not at all.

        The tensors are F32 and belong to one linear layer ``bigram``: lora_A [rank, 514], lora_B [257, rank]. The
        value head is not among them, for PEFT has no place for one; states have it.
        Raises FileExistsError where ``folder`` exists, and EngineError ``non_finite_export`` where a
        weight does not fit into F32.
        """
        if folder.exists():
            raise FileExistsError(f"{folder} exists; an adapter is written once")
        a_columns = zip(*self._policy.a, strict=True)
        lora_a = Tensor("F32", [self._rank, INPUTS], _flat(a_columns))
        lora_b = Tensor("F32", [VOCABULARY, self._rank], _flat(self._policy.b))
        layer = "base_model.model.bigram"
        tensors = {f"{layer}.lora_A.weight": lora_a, f"{layer}.lora_B.weight": lora_b}
        try:
            content = safetensors.encode(tensors, {"format": "pt"})  # PEFT reads only files that say so
        except OverflowError as error:
            raise EngineError("non_finite_export", f"a weight does not fit into F32: {error}") from error
        with _draft_of(folder) as drafts:
            draft = Path(drafts) / folder.name
            draft.mkdir()
            _write(draft / "adapter_model.safetensors", content)
            config = json.dumps(_peft_config(self._rank, base_model), indent=2)
            _write(draft / "adapter_config.json", config.encode())
            draft.rename(folder)


class ByteLMSampler:
    """The weights of one version, frozen; a ``Sampler``. ``version`` is the number of steps they had seen."""

    def __init__(self, policy: _Policy, version: int) -> None:
        self._policy = policy
        self.version = version

    def sample(self, request: JSONObject, seed: str, proceed: Callable[[], None] = lambda: None) -> list[JSONObject]:
        """``num_samples`` sequences ``{"tokens", "logprobs", "stop_reason"}`` that continue the prompt.

        Sequence i depends on the request, ``seed`` and i, not on how many are drawn. ``logprobs`` are the
        policy's own, whatever temperature, top_k and top_p left to choose from. ``proceed`` is called before each
        token, and may raise.
        """
        params = request["sampling_params"]
        prompt = _folded(request["prompt"]["token_ids"])
        stops = {END, *(token for token in params.get("stop", ()) if token <= END)}
        choices: dict[Context, tuple[list[int], list[float]]] = {}

        def continuation(rng: random.Random) -> JSONObject:
            tokens: list[int] = []
            logprobs: list[float] = []
            last_two = prompt[-2:]
            while len(tokens) < params["max_tokens"]:
                proceed()
                context = _context(last_two)
                policy = self._policy.logprobs(context)
                if context not in choices:
                    if len(choices) >= _CACHED_CONTEXTS:
                        choices.clear()
                    choices[context] = _choices(policy, params)
                candidates, cumulative = choices[context]
                token = rng.choices(candidates, cum_weights=cumulative)[0]
                tokens.append(token)
                logprobs.append(policy[token])
                last_two = [last_two[-1], token]
                if token in stops:
                    return {"tokens": tokens, "logprobs": logprobs, "stop_reason": "stop"}
            return {"tokens": tokens, "logprobs": logprobs, "stop_reason": "length"}

        return [continuation(random.Random(f"{seed}:{i}")) for i in range(request["num_samples"])]

    def logprobs(self, token_ids: list[int]) -> list[float | None]:
        """One logprob per token given those before it; the first is None."""
        tokens = _folded(token_ids)
        later = [self._policy.logprobs(c)[token] for c, token in zip(_contexts(tokens), tokens[1:], strict=False)]
        return [None, *later][: len(tokens)]


class _Policy:
    """The weights of one version, never changed, with what was computed from them.

    ``a`` is [514][rank], ``b`` is [257][rank], ``head`` is [514]; flat, they come in this order.
    """

    def __init__(self, weights: list[float], rank: int) -> None:
        adapter, self.head = weights[:-INPUTS], weights[-INPUTS:]
        rows = [adapter[i : i + rank] for i in range(0, len(adapter), rank)]
        self.a, self.b = rows[:INPUTS], rows[INPUTS:]
        self._scale = _LORA_ALPHA / rank
        self._projections: dict[int, array[float]] = {}
        self._logprobs: dict[Context, array[float]] = {}

    def weights(self) -> list[float]:
        return _flat(self.a) + _flat(self.b) + self.head

    def forget(self) -> None:
        """Drop what can be computed again: an old version is kept by its sampler and seldom asked."""
        self._projections.clear()
        self._logprobs.clear()

    def logprobs(self, context: Context) -> Sequence[float]:
        """Log-probability of each of the 257 next tokens."""
        if context in self._logprobs:
            return self._logprobs[context]
        logits: Sequence[float] = _base_logprobs(context[-1] - VOCABULARY)
        for row in context:
            logits = list(map(add, logits, self._projection(row)))
        if not math.isfinite(sum(logits)):
            raise EngineError("non_finite_logits", "the weights have grown so large that the logits overflow")
        top = max(logits)
        shifted = [x - top for x in logits]  # so that exp cannot overflow
        log_total = math.log(sum(map(math.exp, shifted)))
        if len(self._logprobs) >= _CACHED_CONTEXTS:
            self._logprobs.clear()
        result = self._logprobs[context] = array("d", [x - log_total for x in shifted])
        return result

    def _projection(self, row: int) -> array[float]:
        """alpha/rank · B·A[row], what one input adds to the logits."""
        if row not in self._projections:
            a = [self._scale * x for x in self.a[row]]
            self._projections[row] = array("d", [sum(map(mul, b, a)) for b in self.b])
        return self._projections[row]

    def value(self, context: Context) -> float:
        """What the critic expects from here on."""
        value = sum(self.head[row] for row in context)
        if not math.isfinite(value):
            raise EngineError("non_finite_values", "the value head has grown so large that a value overflows")
        return value

    def adapter_gradient(self, slopes: Slopes) -> list[float]:
        """d loss / d A and B, flat.

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
        return _flat(d_a) + _flat(d_b)


def _add_to_slopes(
    slopes: Slopes, contexts: Iterable[Context], targets: Iterable[int], of_datum: Iterable[float]
) -> None:
    for context, target, slope in zip(contexts, targets, of_datum, strict=True):
        if slope != 0:
            of_targets = slopes.setdefault(context, {})
            of_targets[target] = of_targets.get(target, 0.0) + slope


def _add_to_head(d_head: list[float], contexts: Iterable[Context], of_datum: Iterable[float]) -> None:
    for context, slope in zip(contexts, of_datum, strict=True):
        for row in context:
            d_head[row] += slope


def _folded(token_ids: Sequence[int]) -> list[int]:
    """Tokens of this model; the larger ids of another tokenizer are folded onto bytes."""
    return [token if 0 <= token <= END else token % 256 for token in token_ids]


def _contexts(tokens: Sequence[int]) -> list[Context]:
    """For each token, what the one after it depends on."""
    return [_context(tokens[max(t - 1, 0) : t + 1]) for t in range(len(tokens))]


def _context(last_two: Sequence[int]) -> Context:
    """The context that ends in these two tokens, or in this one where a text begins."""
    *prev, cur = last_two
    return (*prev, VOCABULARY + cur)


def _choices(logprobs: Sequence[float], params: Mapping[str, float]) -> tuple[list[int], list[float]]:
    """The tokens that may be drawn, and their cumulative weights.

    Temperature comes first (0 = greedy), then top_k (-1 = off), then top_p: the fewest tokens that hold that share.
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


def _adamw(
    weights: list[float],
    gradient: list[float],
    moment1: list[float],
    moment2: list[float],
    step: int,
    optimizer: Mapping[str, float],
) -> tuple[list[float], list[float], list[float]]:
    """Weights and moments after step number ``step``, which counts from 1. The lists it is given stay."""
    rate, eps, beta1, beta2 = (optimizer[key] for key in ("learning_rate", "eps", "beta1", "beta2"))
    kept = 1 - rate * optimizer["weight_decay"]
    new1, new2 = 1 - beta1, 1 - beta2
    moment1 = [beta1 * m + new1 * g for m, g in zip(moment1, gradient, strict=True)]
    moment2 = [beta2 * v + new2 * g * g for v, g in zip(moment2, gradient, strict=True)]
    rate /= 1 - beta1**step  # the moments start at zero: this and the next line undo that
    unbias = 1 / math.sqrt(1 - beta2**step)
    roots = map(math.sqrt, moment2)
    weights = [
        kept * w - rate * (m / (unbias * root + eps)) for w, m, root in zip(weights, moment1, roots, strict=True)
    ]
    return weights, moment1, moment2


@functools.cache
def _counts() -> tuple[Counter[tuple[int, int]], Counter[int]]:
    """How often the base text has each pair of tokens, and each token."""
    lines = [[*line.encode(), END] for line in _BASE_TEXT.splitlines()]
    tokens = [END, *_flat(lines)]  # with an end before the first line, every line starts after one
    return Counter(pairwise(tokens)), Counter(tokens[1:])


@functools.cache
def _base_logprobs(cur: int) -> list[float]:
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


def _flat(rows: Iterable[Iterable[Number]]) -> list[Number]:
    return list(chain.from_iterable(rows))


def _draft_of(path: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder beside ``path`` to write it in; a rename then puts it in place, whole or not at all."""
    return tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.")


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _state_values(path: Path, tensors: Mapping[str, Tensor], name: str, rank: int) -> list[float]:
    expected = ("F64", [(INPUTS + VOCABULARY) * rank + INPUTS])
    tensor = tensors.get(name)
    if tensor is None or (tensor.dtype, tensor.shape) != expected:
        found = "missing" if tensor is None else f"{tensor.dtype} {tensor.shape}"
        raise ValueError(f"{path}: {name} is {found}; expected {expected[0]} {expected[1]} for rank {rank}")
    if not all(map(math.isfinite, tensor.values)):
        raise ValueError(f"{path}: {name} holds a number that is not finite")
    return tensor.values


def _peft_config(rank: int, base_model: str) -> JSONObject:
    return {
        "peft_type": "LORA",
        "task_type": None,  # PEFT's task types wrap models of transformers; this one is a single layer
        "base_model_name_or_path": base_model,
        "target_modules": ["bigram"],
        "r": rank,
        "lora_alpha": _LORA_ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
