"""The language model of ``torch_lora.py``: one base model; each run adds LoRA layers of its own."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

try:
    import peft  # noqa: F401 - needed by torch_lora.py, which imports this file first
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.pytorch_utils import Conv1D
except ModuleNotFoundError as missing:
    remedy = "this engine needs: pip install torch transformers peft"
    raise ModuleNotFoundError(f"{missing}; {remedy}", name=missing.name) from None

from whitney_loop.local.engine import EngineError

LORA_SCALE = 2.0
"""lora_alpha / rank. It is the same at every rank, so a learning rate that is good at one rank is good at another."""

Adapter = dict[str, torch.Tensor]
"""``NAME.lora_A`` [rank, inputs] and ``NAME.lora_B`` [outputs, rank] of each linear layer NAME, and ``value_head``."""


class BaseModel:
    """A causal language model whose own weights never change.

    ``model``: a folder or a name that transformers loads, on CUDA (in bfloat16) if there is one. Raises ValueError or
    OSError if it does not load.
    """

    def __init__(self, model: str, batch_tokens: int, gradient_checkpointing: bool) -> None:
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda" if cuda else "cpu")
        self.batch_tokens = batch_tokens
        self.net, loading = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16 if cuda else torch.float32, output_loading_info=True
        )
        if missing_weights := sorted(loading["missing_keys"]):  # transformers has drawn them at random
            raise ValueError(f"{model} lacks {len(missing_weights)} weights of its model, first {missing_weights[0]}")
        self.net.to(self.device).eval().requires_grad_(False)
        self.vocabulary: int = self.net.get_input_embeddings().num_embeddings
        self.context_length: int | None = getattr(self.net.config, "max_position_embeddings", None)
        self.hidden_size: int = self.net.config.hidden_size
        self.decode = _decoder(model)
        ends = self.net.generation_config.eos_token_id  # one, several or None
        self.end_tokens: set[int] = set(ends) if isinstance(ends, list) else {ends} - {None}

        parameters = inspect.signature(self.net.forward).parameters
        self._takes_positions, self._takes_logits_to_keep = (
            name in parameters for name in ("position_ids", "logits_to_keep")
        )
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"  # its name until transformers 5

        head = self.net.get_output_embeddings()
        self.layers: dict[str, Any] = {
            name: layer
            for name, layer in self.net.named_modules()
            if isinstance(layer, (torch.nn.Linear, Conv1D)) and layer is not head
        }
        for name, layer in self.layers.items():
            layer.register_forward_hook(self._lora_hook(name))
        self._adapter: Adapter = {}  # read by the hooks, and changed only under the lock
        self._lock = threading.Lock()
        self._checkpointed: list[Any] = []
        if gradient_checkpointing:
            self.net.gradient_checkpointing_enable({"use_reentrant": False})
            self._checkpointed = [each for each in self.net.modules() if hasattr(each, "gradient_checkpointing")]

    def _lora_hook(self, name: str) -> Callable[..., torch.Tensor]:
        def add_lora(layer: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            a, b = self._adapter[f"{name}.lora_A"], self._adapter[f"{name}.lora_B"]
            return output + LORA_SCALE * (inputs[0] @ a.T @ b.T)

        return add_lora

    def shapes(self, rank: int) -> dict[str, list[int]]:
        """Return the shapes of an adapter's tensors, in the order in which a run's vector of weights holds them."""
        shapes: dict[str, list[int]] = {}
        for name, layer in self.layers.items():
            inputs, outputs = layer.weight.shape if isinstance(layer, Conv1D) else layer.weight.shape[::-1]
            shapes |= {f"{name}.lora_A": [rank, inputs], f"{name}.lora_B": [outputs, rank]}
        return shapes | {"value_head": [self.hidden_size]}

    def adapter(self, weights: torch.Tensor, rank: int) -> Adapter:
        """Return a run's vector of weights as tensors of the model's type."""
        shapes = self.shapes(rank)
        parts = weights.to(self.net.dtype).split([math.prod(shape) for shape in shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}

    @contextmanager
    def using(self, adapter: Adapter, *, training: bool = False) -> Iterator[None]:
        """Hold the model with this adapter in it. The backward pass belongs inside: checkpointing computes again."""
        with self._lock, torch.set_grad_enabled(training):
            self._adapter = adapter
            for layer in self._checkpointed:
                layer.training = training  # of this layer alone: what is inside it, such as dropout, stays off
            try:
                yield
            finally:
                self._adapter = {}

    def score(
        self, texts: list[list[int]], targets: list[list[int]], *, values: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the logprobs of the targets, float32 [texts, longest], and if asked the values at the same places.

        Target i follows token i. Texts are padded on the right, where a causal model does not look.
        """
        tokens, padded_targets = (torch.tensor(padded(rows), device=self.device) for rows in (texts, targets))
        output = self.net(input_ids=tokens, use_cache=False, output_hidden_states=values)
        logits = output.logits.float()
        logprobs = logits.gather(-1, padded_targets[..., None])[..., 0] - logits.logsumexp(-1)
        if not values:
            return logprobs, None
        return logprobs, output.hidden_states[-1].float() @ self._adapter["value_head"].float()

    def next_logits(
        self, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any
    ) -> tuple[torch.Tensor, Any]:
        """Return the logits after the last token, float32 [texts, vocabulary], and the cache with them in it."""
        arguments: dict[str, Any] = {self._cache_name: cache}
        if self._takes_positions:
            arguments["position_ids"] = positions
        if self._takes_logits_to_keep:
            arguments["logits_to_keep"] = 1
        output = self.net(input_ids=tokens, attention_mask=mask, use_cache=True, **arguments)
        return output.logits[:, -1].float(), output[self._cache_name]


def _decoder(model: str) -> Callable[[Sequence[int]], str] | None:
    """Return a function from token ids to text, without special tokens; None if the model comes without a tokenizer."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError):
        return None
    if len(tokenizer) == len(tokenizer.all_special_tokens):  # an empty one, which transformers has made up
        return None
    return lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=True))


def batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield indices of texts of similar length, whose number times the longest length is at most ``batch_tokens``.

    A text that is longer than this is a batch of its own.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):  # so the newest is the longest
        if batch and (len(batch) + 1) * lengths[index] > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def padded(rows: Sequence[list[int]]) -> list[list[int]]:
    """Return the rows with zeros behind them, all of one length."""
    longest = max(map(len, rows))
    return [row + [0] * (longest - len(row)) for row in rows]


@contextmanager
def enough_memory(what: str) -> Iterator[None]:
    """Raise EngineError ``out_of_memory`` if memory runs out in the block, which must not have changed anything."""
    try:
        yield
        return
    except (torch.OutOfMemoryError, MemoryError):
        pass
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # the words of PyTorch's allocator on a CPU
            raise
    free_memory()  # out here the exception is gone, and with it the tensors that its frames held
    remedy = "lower the engine's batch_tokens, set its gradient_checkpointing=true, or send shorter texts"
    raise EngineError("out_of_memory", f"not enough memory for {what}; {remedy}")


def free_memory() -> None:
    """Give back to the device what no tensor uses any longer."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
