"""The data set of a loop: its sample requests, which of them a cycle takes, and with which seed.

Which requests cycle c takes, and what is drawn for them, depends on the seed of the run and on c alone. So a run that
is resumed at c continues exactly as it would have.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from whitney_loop.callables import examples_folder
from whitney_loop.loop.files import read_text
from whitney_loop.loop.options import UsageError
from whitney_loop.payloads import check_sample_request, sample_request

SEED_BITS = 31  # seeds are drawn below 2**31, so that they fit into an int32


class Request(dict[str, Any]):
    """The payload of a ``sample``, maybe with ``metadata``, and the file and line that it came from."""

    def __init__(self, payload: Mapping[str, Any], where: str) -> None:
        super().__init__(payload)
        self.where = where


def read_requests(path: Path | None, *, embedded: bool, option: str = "--sample-json") -> list[Request]:
    """Return the checked payloads of ``sample`` in a file: one, an array, or a JSONL of them.

    Without a file the embedded service gets the example. Raise UsageError with the file and the line that is wrong.
    """
    if path is None and not embedded:
        raise UsageError(f"{option} is required unless the embedded service is used (--local rehearses)")
    path = path or examples_folder() / "sample.json"
    try:
        text = read_text(path)
        entries = _lines(path, text) if _is_jsonl(path, text) else _entries(path, text)
        requests = [_checked(payload, where) for where, payload in entries]
    except ValueError as error:
        raise UsageError(f"{option} {error}") from None
    if not requests:
        raise UsageError(f"{option} {path}: holds no request")
    return requests


def write_prompts(path: str | Path, prompts: Iterable[tuple[Sequence[int], dict[str, Any]]], **sampling: Any) -> None:
    """Write a prompt file: a request per line, from pairs of token ids and metadata, such as the prompt's answer.

    ``sampling`` are the keywords of ``sample_request``: ``num_samples``, ``max_tokens`` and others. Nothing is written
    and ValueError is raised, with the index of the pair, if one of them is out of range or JSON cannot hold a metadata.
    """
    lines = []
    for index, (tokens, metadata) in enumerate(prompts):
        try:
            request = sample_request(tokens, **sampling) | {"metadata": metadata}
            check_sample_request(request, in_file=True)
            lines.append(json.dumps(request, allow_nan=False) + "\n")
        except (TypeError, ValueError) as error:
            raise ValueError(f"prompts[{index}]: {error}") from None
    Path(path).write_text("".join(lines), encoding="utf-8")


def _checked(payload: Any, where: str) -> Request:
    try:
        check_sample_request(payload, in_file=True)
    except ValueError as error:
        raise ValueError(f"{where}: {error}{_hint_on_text(payload)}") from None
    return Request(payload, where)


def _is_jsonl(path: Path, text: str) -> bool:
    """Return whether the file is JSONL: by its name, or because its first line is a whole object and more follow."""
    first, _, rest = text.strip().partition("\n")
    if path.suffix == ".jsonl" or not rest:
        return path.suffix == ".jsonl"
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _lines(path: Path, text: str) -> list[tuple[str, Any]]:
    """Return (where, payload) of each line."""
    numbered = enumerate(text.split("\n"), start=1)
    return [(f"{path}:{number}", _parsed(line, f"{path}:{number}")) for number, line in numbered if line.strip()]


def _entries(path: Path, text: str) -> list[tuple[str, Any]]:
    """Return (where, payload) of each entry of an array, or of the one request."""
    read = _parsed(text, f"{path}")
    if not isinstance(read, list):
        return [(f"{path}", read)]
    return [(f"{path}, entry {index} of the array (the first is 0)", payload) for index, payload in enumerate(read)]


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text else ""
        raise ValueError(f"{where}: {error.msg} at {line}column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {error}") from None


def _hint_on_text(request: Any) -> str:
    """Return what to do if the prompt is text instead of token ids; empty if it is not."""
    prompt = request.get("prompt") if isinstance(request, dict) else request
    token_ids = prompt.get("token_ids") if isinstance(prompt, dict) else prompt
    first = token_ids[0] if isinstance(token_ids, list) and token_ids else token_ids
    return '; tokenize the text first: a prompt is {"token_ids": [integers]}' if isinstance(first, str) else ""


def notes_on_groups(requests: Sequence[Request]) -> list[str]:
    """Return a note to print if some prompts are sampled once only; empty if none is."""
    single = [request.where for request in requests if request["num_samples"] == 1]
    note = "num_samples is 1: a loss that compares the completions of a prompt, as GRPO's, skips every such group"
    return [f"{single[0]}: {note} ({len(single)} of {len(requests)} requests)"] if single else []


def requests_of_cycle(requests: Sequence[Request], size: int, seed: int, cycle: int) -> list[Request]:
    """Return the ``size`` requests of a cycle, each with a seed. Each pass over the data has its own order."""
    taken = [_at(requests, seed, position) for position in range(cycle * size, (cycle + 1) * size)]
    return [_with_seed(request, f"{seed}:{cycle}:{index}") for index, request in enumerate(taken)]


def evaluation_requests(requests: Sequence[Request], seed: int) -> list[Request]:
    """Return the requests of an evaluation with seeds: always the same ones, so that only the weights differ."""
    return [_with_seed(request, f"{seed}:evaluation:{index}") for index, request in enumerate(requests)]


def _at(requests: Sequence[Request], seed: int, position: int) -> Request:
    """Return the request at this position of all passes, one pass after the other."""
    epoch, index = divmod(position, len(requests))
    return requests[_order(len(requests), f"{seed}:epoch {epoch}")[index]]


@functools.lru_cache(maxsize=2)  # a cycle may end one pass and begin the next
def _order(size: int, origin: str) -> list[int]:
    return random.Random(origin).sample(range(size), size)


def _with_seed(request: Request, origin: str) -> Request:
    """Return the request with a seed derived from ``origin``, unless it has one."""
    params = request["sampling_params"]
    if "seed" in params:
        return request
    seeded = {**params, "seed": random.Random(origin).getrandbits(SEED_BITS)}
    return Request({**request, "sampling_params": seeded}, request.where)


def fingerprint(data: Sequence[Any]) -> str:
    """Return a hash of the data set: a run can only be continued on the same one."""
    return hashlib.sha256(json.dumps(list(data), sort_keys=True).encode()).hexdigest()[:16]
