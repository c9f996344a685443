"""The data set of a loop: its requests, which of them a cycle takes, and with which seed.

Which requests cycle c takes, and what is drawn for them, depends on the seed of the run and on c alone, so a run that
is resumed at c goes on exactly as it would have.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loop_support import SEED_BITS, Payload, UsageError, is_embedded
from whitney_loop.payloads import check_sample_request

EXAMPLE_REQUEST = Path(__file__).with_name("sample.json")


def requests_of(options: argparse.Namespace) -> list[Payload]:
    """The payloads of ``sample`` in ``--sample-json``, checked; on the embedded service the example is the default."""
    path = options.sample_json or (EXAMPLE_REQUEST if is_embedded(options) else None)
    if path is None:
        raise UsageError("--sample-json is required away from the embedded service (--local rehearses)")
    return read_requests(path)


def read_requests(path: Path) -> list[Payload]:
    """One request, an array of them, or a JSONL of them; UsageError names the file and the line that is wrong."""
    try:
        content = path.read_bytes()
        found = _lines(content) if _is_jsonl(path, content) else _entries(content)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--sample-json {path}: {error}") from None
    requests: list[Payload] = []
    for where, read in found:
        try:
            request: Any = json.loads(read) if isinstance(read, bytes) else read
            check_sample_request(request)
        except json.JSONDecodeError as error:
            raise UsageError(f"--sample-json {path}{where}: {error.msg} at column {error.colno}") from None
        except (ValueError, RecursionError) as error:
            raise UsageError(f"--sample-json {path}{where}: {error}") from None
        requests.append(request)
    if not requests:
        raise UsageError(f"--sample-json {path}: holds no request")
    return requests


def _is_jsonl(path: Path, content: bytes) -> bool:
    """By its name, or since its first line is complete and more follows: an object may be spread over lines too."""
    first, _, rest = content.strip().partition(b"\n")
    if path.suffix == ".jsonl" or not rest:
        return path.suffix == ".jsonl"
    try:
        return isinstance(json.loads(first), dict)
    except ValueError:
        return False


def _lines(content: bytes) -> list[tuple[str, object]]:
    """(where, line), each as bytes: still to be read."""
    lines = enumerate(content.split(b"\n"), start=1)
    return [(f":{number}", line) for number, line in lines if line.strip()]


def _entries(content: bytes) -> list[tuple[str, object]]:
    """(where, entry) of an array, or the one request."""
    read = json.loads(content)
    if not isinstance(read, list):
        return [("", read)]
    return [(f", entry {index} of the array (the first is 0)", request) for index, request in enumerate(read)]


@dataclass(frozen=True)
class Batches:
    """The requests of each cycle: ``size`` of them, in an order that is shuffled anew for each pass over the data."""

    requests: Sequence[Payload]
    size: int
    seed: int

    def of_cycle(self, cycle: int) -> list[Payload]:
        """The requests of this cycle, each with a seed of its own."""
        start = cycle * self.size
        taken = [self._at(position) for position in range(start, start + self.size)]
        return [_with_seed(request, f"{self.seed}:{cycle}:{index}") for index, request in enumerate(taken)]

    def _at(self, position: int) -> Payload:
        """The request at this position of all passes, one after the other."""
        epoch, index = divmod(position, len(self.requests))
        return self.requests[_order(len(self.requests), f"{self.seed}:epoch {epoch}")[index]]


def fingerprint(requests: Sequence[Payload]) -> str:
    """Of the data set: a run can only be continued on the same one."""
    return hashlib.sha256(json.dumps(list(requests), sort_keys=True).encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=2)  # a cycle may end one pass and begin the next
def _order(size: int, origin: str) -> list[int]:
    return random.Random(origin).sample(range(size), size)


def _with_seed(request: Payload, origin: str) -> Payload:
    """The request with a seed derived from ``origin``, unless it has one."""
    params = request["sampling_params"]
    if "seed" in params:
        return request
    return {**request, "sampling_params": {**params, "seed": random.Random(origin).getrandbits(SEED_BITS)}}
