"""A real language model behind the embedded service: PyTorch, transformers and PEFT.

    python -m whitney_loop.local --engine engines.torch_lora:make --engine-option model=FOLDER_OR_NAME

Any causal language model that transformers loads is trained, on CUDA if there is one. LoRA trains two small matrices
beside each frozen layer. ``torch_model.py`` has the base model that all runs share, and how texts become logprobs. This
file has what a run keeps for itself: its LoRA weights are one vector, so a gradient or a moment of AdamW is one vector
too. Weights are never changed in place: a step makes new ones, and a sampler keeps those that it was made with.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from engines.torch_model import LORA_SCALE, BaseModel, batches, enough_memory, free_memory, padded  # isort: skip

import torch
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers.pytorch_utils import Conv1D

from whitney_loop.local.engine import Backend, EngineError, JSONObject
from whitney_loop.local.objectives import CLIPPING, OBJECTIVES, Outcome, evaluate


def make(model: str, batch_tokens: int = 2048, gradient_checkpointing: bool = False) -> Backend:
    """Load ``model``, a folder or a name on the model hub.

    batch_tokens: the most tokens in one batch, padding included; a longer text is a batch of its own. A cancelled run
    ends after its current batch. gradient_checkpointing: train in less memory, but more slowly.
    """
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens is {batch_tokens}; expected 1 or more")
    return TorchBackend(model, BaseModel(model, batch_tokens, gradient_checkpointing))


class TorchBackend(Backend):
    """The base model and its limits."""

    name = "torch-lora"
    losses = frozenset(OBJECTIVES)
    suggested_learning_rate = 1e-3

    def __init__(self, model: str, base: BaseModel) -> None:
        self.model = model
        self.vocabulary = base.vocabulary
        self.context_length = base.context_length
        self.largest_rank = base.hidden_size
        self.decode = base.decode
        self._base = base

    def new_run(self, *, rank: int, seed: int, proceed: Callable[[], None]) -> TorchRun:
        with enough_memory(f"a run of rank {rank}"):
            return TorchRun(self._base, rank, seed, proceed)


class TorchRun:
    """One run: its weights, the gradient for the next step, and AdamW's moments, each one float32 vector."""

    def __init__(self, base: BaseModel, rank: int, seed: int, proceed: Callable[[], None]) -> None:
        self._base = base
        self._rank = rank
        self._proceed = proceed
        generator = torch.Generator().manual_seed(seed)
        parts = []
        for name, shape in base.shapes(rank).items():
            part = torch.zeros(shape)  # B and the value head are 0: training starts at the base model
            if name.endswith("lora_A"):
                bound = shape[1] ** -0.5  # as PEFT draws it
                part.uniform_(-bound, bound, generator=generator)
            parts.append(part.flatten())
        self._weights = torch.cat(parts).to(base.device)
        self._moment1 = torch.zeros_like(self._weights)
        self._moment2 = torch.zeros_like(self._weights)
        self._gradient: torch.Tensor | None = None
        self._step = 0

    def forward(self, payload: JSONObject) -> JSONObject:
        with enough_memory("this forward"):
            return self._evaluate(payload, None)

    def forward_backward(self, payload: JSONObject) -> JSONObject:
        with enough_memory("this forward_backward"):
            gradient = torch.zeros_like(self._weights)
            result = self._evaluate(payload, gradient)
            if self._gradient is not None:
                gradient += self._gradient
        if not gradient.isfinite().all():
            raise EngineError("non_finite_loss", "the gradient is not finite; nothing was accumulated")
        self._gradient = gradient
        return result

    def _evaluate(self, payload: JSONObject, gradient: torch.Tensor | None) -> JSONObject:
        """Return the result of a payload, and add its gradient to ``gradient`` if there is one."""
        loss_function, data = payload["loss_function"], payload["data"]
        training, critic = gradient is not None, loss_function == "ppo_critic"
        texts = [datum["input"]["token_ids"] for datum in data]
        tensors = [{name: tensor["values"] for name, tensor in datum["loss_inputs"].items()} for datum in data]
        outputs: list[JSONObject] = [{}] * len(data)
        outcomes = [Outcome(0.0, [], 0, 0)] * len(data)
        for batch in batches([len(text) for text in texts], self._base.batch_tokens):
            self._proceed()
            weights = self._weights.detach().requires_grad_(training)
            with torch.set_grad_enabled(training):
                adapter = self._base.adapter(weights, self._rank)
            with self._base.using(adapter, training=training):
                logprobs, values = self._base.score(
                    [texts[index] for index in batch],
                    [tensors[index]["target_tokens"] for index in batch],
                    values=critic,
                )
                trained = logprobs if values is None else values
                slopes = torch.zeros_like(trained)
                for row, index in enumerate(batch):
                    length = len(texts[index])
                    of_targets = trained[row, :length].tolist()
                    outcome = evaluate(loss_function, of_targets, tensors[index], payload["loss_config"])
                    if not math.isfinite(outcome.loss):
                        raise EngineError("non_finite_loss", f"the loss is {outcome.loss} at data[{index}]")
                    slopes[row, :length] = torch.tensor(outcome.slopes)
                    outcomes[index] = outcome
                    outputs[index] = {"logprobs": logprobs[row, :length].tolist()}
                    if critic:
                        outputs[index]["values"] = of_targets
                if gradient is not None:
                    gradient += torch.autograd.grad(trained, weights, slopes)[0]
        loss = sum(outcome.loss for outcome in outcomes)
        metrics = {"loss:sum": loss}
        if loss_function in CLIPPING:
            counted = sum(outcome.counted for outcome in outcomes)
            metrics["clip_frac"] = sum(outcome.clipped for outcome in outcomes) / max(counted, 1)
        return {"loss": loss, "metrics": metrics, "outputs": outputs}

    def optim_step(self, optimizer: JSONObject) -> JSONObject:
        """Take one AdamW step (decoupled decay, 1711.05101). Nothing changes unless all new numbers are finite."""
        if self._gradient is None:
            raise EngineError("no_gradients", "optim_step needs a forward_backward since the last step")
        rate, eps, beta1, beta2 = (optimizer[name] for name in ("learning_rate", "eps", "beta1", "beta2"))
        with enough_memory("this optim_step"):
            gradient, step = self._gradient, self._step + 1
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float64).item()
            if 0 < optimizer["grad_clip_norm"] < norm:
                gradient = gradient * (optimizer["grad_clip_norm"] / norm)
            moment1 = beta1 * self._moment1 + (1 - beta1) * gradient
            moment2 = beta2 * self._moment2 + (1 - beta2) * gradient**2
            change = (moment1 / (1 - beta1**step)) / ((moment2 / (1 - beta2**step)).sqrt() + eps)
            weights = (1 - rate * optimizer["weight_decay"]) * self._weights - rate * change
            finite = all(bool(each.isfinite().all()) for each in (weights, moment1, moment2))
        if not finite:
            raise EngineError("non_finite_update", f"a weight would not be finite (grad_norm {norm}); nothing changed")
        self._weights, self._moment1, self._moment2, self._step = weights, moment1, moment2, step
        self._gradient = None
        return {"step": step, "grad_norm": norm}

    def sampler(self) -> TorchSampler:
        return TorchSampler(self._base, self._weights, self._rank, self._step, self._proceed)

    def save_state(self, folder: Path) -> int:
        """Write ``state.safetensors``: weights, moments and step. A gradient that waits for its step is left out."""
        state = {"weights": self._weights, "moment1": self._moment1, "moment2": self._moment2}
        save_file(state | {"step": torch.tensor(self._step)}, folder / "state.safetensors")
        return self._step

    def load_state(self, folder: Path) -> None:
        try:
            state = load_file(folder / "state.safetensors", device=str(self._base.device))
        except SafetensorError as error:
            raise ValueError(f"{folder}: {error}") from error
        names, size = ("weights", "moment1", "moment2"), self._weights.shape
        for name in names:
            if name not in state or state[name].shape != size or not state[name].isfinite().all():
                raise ValueError(f"{folder}: expected {name}, {size.numel()} finite numbers")
        self._weights, self._moment1, self._moment2 = (state[name] for name in names)
        self._step = int(state["step"])
        self._gradient = None

    def export_lora(self, folder: Path, *, base_model: str) -> None:
        """Write the LoRA layers as PEFT loads them. The value head is left out: PEFT has no place for one."""
        layers = self._base.layers
        adapter = self._base.adapter(self._weights, self._rank)
        tensors = {f"base_model.model.{name}.weight": adapter[name].clone() for name in adapter if name != "value_head"}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        LoraConfig(
            base_model_name_or_path=base_model,
            task_type="CAUSAL_LM",
            r=self._rank,
            lora_alpha=int(LORA_SCALE * self._rank),
            target_modules=sorted({name.rpartition(".")[2] for name in layers}),
            fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in layers.values()),
            inference_mode=True,
        ).save_pretrained(folder)

    def close(self) -> None:
        self._weights = self._moment1 = self._moment2 = torch.empty(0)
        self._gradient = None
        free_memory()


@dataclass
class Text:
    """A text that is being sampled, with random numbers of its own."""

    request: int  # its place among the requests
    prompt: list[int]
    max_tokens: int
    stops: set[int]
    random: random.Random
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def stop_reason(self) -> str | None:
        if self.tokens[-1] in self.stops:
            return "stop"
        return "length" if len(self.tokens) == self.max_tokens else None


class TorchSampler:
    """The weights of one version."""

    def __init__(
        self, base: BaseModel, weights: torch.Tensor, rank: int, version: int, proceed: Callable[[], None]
    ) -> None:
        self.version = version
        self._base = base
        self._adapter = base.adapter(weights, rank)
        self._proceed = proceed

    def sample(self, request: JSONObject, seed: str) -> list[JSONObject]:
        return self.sample_many([(request, seed)])[0]

    def sample_many(self, requests: list[tuple[JSONObject, str]]) -> list[list[JSONObject]]:
        """Sample all requests together, as far as ``batch_tokens`` allows.

        Text i of a request draws by its seed and i. The other requests change only the last bit of a logprob (of a
        bfloat16 on CUDA), since the sums of a larger batch are added in another order.
        """
        texts = []
        alike: dict[tuple[float, int, float], list[Text]] = {}  # texts that are drawn in the same way
        for index, (request, seed) in enumerate(requests):
            params = request["sampling_params"]
            drawing = params.get("temperature", 1.0), params.get("top_k", -1), params.get("top_p", 1.0)
            stops = self._base.end_tokens.union(params.get("stop", ()))
            for number in range(request["num_samples"]):
                own_random = random.Random(f"{seed}:{number}")
                text = Text(index, request["prompt"]["token_ids"], params["max_tokens"], stops, own_random)
                texts.append(text)
                alike.setdefault(drawing, []).append(text)
        with enough_memory("this sample"):
            for drawing, group in alike.items():
                lengths = [len(text.prompt) + text.max_tokens for text in group]
                for batch in batches(lengths, self._base.batch_tokens):
                    self._continue([group[index] for index in batch], *drawing)
        answers: list[list[JSONObject]] = [[] for _ in requests]
        for text in texts:
            sequence = {"tokens": text.tokens, "logprobs": text.logprobs, "stop_reason": text.stop_reason()}
            answers[text.request].append(sequence)
        return answers

    def _continue(self, texts: list[Text], temperature: float, top_k: int, top_p: float) -> None:
        """Sample these texts to their ends. A prompt is computed once, for all its texts."""
        prompts = {text.request: text.prompt for text in texts}
        ones = [[1] * len(prompt) for prompt in prompts.values()]
        tokens, mask = (  # padded on the left, so that all texts go on at the same place
            torch.tensor([row[::-1] for row in padded([row[::-1] for row in rows])], device=self._base.device)
            for rows in (prompts.values(), ones)
        )
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        place = {request: row for row, request in enumerate(prompts)}
        rows = [place[text.request] for text in texts]  # the row of the batch that each text continues
        cache = None
        while texts:
            self._proceed()
            with self._base.using(self._adapter):
                logits, cache = self._base.next_logits(tokens, mask, positions, cache)
                if rows != list(range(len(logits))):  # after the prompts, and when texts have ended
                    chosen = torch.tensor(rows, device=self._base.device)
                    logits, mask, positions = logits[chosen], mask[chosen], positions[chosen]
                    cache.batch_select_indices(chosen)
                drawn, logprobs = draw(logits, [text.random.random() for text in texts], temperature, top_k, top_p)
            for text, token, logprob in zip(texts, drawn.tolist(), logprobs.tolist(), strict=True):
                text.tokens.append(token)
                text.logprobs.append(logprob)
            tokens, positions = drawn[:, None], positions[:, -1:] + 1
            mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
            rows = [row for row, text in enumerate(texts) if text.stop_reason() is None]
            texts = [texts[row] for row in rows]

    def logprobs(self, token_ids: list[int]) -> list[float | None]:
        if len(token_ids) == 1:
            return [None]
        self._proceed()
        with enough_memory("these logprobs"), self._base.using(self._adapter):
            logprobs, _ = self._base.score([token_ids[:-1]], [token_ids[1:]])
        return [None, *logprobs[0].tolist()]

    def close(self) -> None:
        self._adapter = {}
        free_memory()


def draw(
    logits: torch.Tensor, uniform: list[float], temperature: float, top_k: int, top_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one token per row, and its logprob before temperature (0: greedy), top_k and top_p, in this order.

    Row i takes the first token at which the sum of the shares is above ``uniform[i]``, a number from 0 to 1.
    """
    logprobs = logits.log_softmax(-1)
    if temperature == 0:
        drawn = logprobs.argmax(-1, keepdim=True)
        return drawn[:, 0], logprobs.gather(-1, drawn)[:, 0]
    shares = ((logits - logits.amax(-1, keepdim=True)).double() / temperature).softmax(-1)
    order = None
    if top_k > 0 or top_p < 1:
        shares, order = shares.sort(dim=-1, descending=True, stable=True)
        if top_k > 0:
            shares[:, top_k:] = 0
        if top_p < 1:
            before = shares.cumsum(-1) - shares
            shares[before >= top_p * shares.sum(-1, keepdim=True)] = 0
    sums = shares.cumsum(-1)
    bounds = torch.tensor(uniform, dtype=torch.float64, device=logits.device)[:, None] * sums[:, -1:]
    drawn = torch.searchsorted(sums, bounds, right=True).clamp(max=logits.shape[-1] - 1)
    if order is not None:
        drawn = order.gather(-1, drawn)
    return drawn[:, 0], logprobs.gather(-1, drawn)[:, 0]
