"""The wire in one place: the contract's paths, statuses and codes, and the field names that the client reads or writes.

[doc]: Whitney's documentation says so. [ours]: this project's reading; if your deployment differs, edit it here. The
fields of payloads and results, such as ``data``, ``loss`` and ``state_id``, stand in the code that uses them.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping
from typing import Any, TypeGuard

# Paths; {names} are filled in by path().
CAPABILITIES = "/v1/training/capabilities"  # [doc]
SESSIONS = "/v1/training/sessions"  # [ours], and so is every path below
SESSION = "/v1/training/sessions/{session_id}"
CLOSE_SESSION = "/v1/training/sessions/{session_id}/close"  # the word "close": [doc]
RUNS = "/v1/training/sessions/{session_id}/runs"
RUN = "/v1/training/runs/{run_id}"
FINISH_RUN = "/v1/training/runs/{run_id}/finish"  # the words "finish" and "cancel": [doc]
CANCEL_RUN = "/v1/training/runs/{run_id}/cancel"
OPERATIONS = "/v1/training/runs/{run_id}/operations"
SAMPLER_OPERATIONS = "/v1/training/runs/{run_id}/samplers/{sampler_id}/operations"
OPERATION = "/v1/training/runs/{run_id}/operations/{operation_id}"
WAIT = "?wait_s={seconds}"  # after OPERATION: answer when it ends, or after so many seconds

# Fields of sessions and runs [ours]
PROVIDERS = "providers"
PROVIDER = "provider"
OFFERED = "operations"  # in the answer of CAPABILITIES
SESSION_ID = "session_id"
RUN_ID = "run_id"
RUN_LIST = "runs"
MODEL = "model"
LORA = "lora"
RANK = "rank"
SEED = "seed"
RESUME_FROM = "resume_from"
STATUS = "status"
NEXT_SEQ_ID = "next_seq_id"
IDEMPOTENCY_KEY = "Idempotency-Key"  # a header

# Fields of operations [ours], besides RUN_ID and STATUS
OPERATION_ID = "operation_id"
KIND = "kind"
SEQ_ID = "seq_id"
PAYLOAD = "payload"
RESULT = "result"
SAMPLER_ID = "sampler_id"
SEQUENCES = "sequences"  # [doc], and so are the two below
TOKENS = "tokens"
LOGPROBS = "logprobs"

METADATA = "metadata"  # in a request of a prompt file, such as its right answer: for the user's functions, never sent

# Fields of errors [ours]
ERROR = "error"
ERROR_CODE = "code"
ERROR_MESSAGE = "message"
ERROR_RETRYABLE = "retryable"
REQUEST_ID = "request_id"

# Statuses and codes [ours]; a status that is not listed here is not final.
SUCCEEDED = "succeeded"
FAILED = "failed"  # of operations and of runs
ALLOCATING = "allocating"
ENDED_OPERATION = frozenset({"succeeded", "failed", "cancelled"})
ENDED_RUN = frozenset({"finished", "cancelled", "failed"})
ENDED_SESSION = frozenset({"closed"})
CANCELLED_RUN = frozenset({"cancelling", "cancelled"})
RUN_NOT_ACTIVE = "run_not_active"
ORDER_LOST = frozenset({"seq_conflict", "seq_gap"})
GONE = frozenset({404, 410})  # HTTP: it was closed, and the service has forgotten it since
RESULTS_KEPT = 256  # a service keeps the results of this many newest operations of a run

_LONGEST_ID = 300  # characters


def path(template: str, **ids: str) -> str:
    """Fill the ids into one of the paths above, percent-encoded."""
    return template.format(**{name: urllib.parse.quote(value, safe="") for name, value in ids.items()})


def error_of(answer: Mapping[str, Any]) -> tuple[str | None, str | None, bool]:
    """Return message, code and ``retryable`` of the error in an answer. A message or code that is no string is None."""
    error = answer.get(ERROR)
    error = error if isinstance(error, dict) else {}
    message, code = error.get(ERROR_MESSAGE), error.get(ERROR_CODE)
    return (
        message if isinstance(message, str) else None,
        code if isinstance(code, str) else None,
        error.get(ERROR_RETRYABLE) is True,
    )


def wire_request(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a sampler's payload without ``metadata``. Return anything but a dict unchanged: the service rejects it."""
    if not isinstance(request, dict):
        return request
    return {name: value for name, value in request.items() if name != METADATA}


def is_id(value: object) -> TypeGuard[str]:
    """Return whether the value can be an id: it is safe in a path and in a message."""
    return isinstance(value, str) and 0 < len(value) <= _LONGEST_ID and value.isprintable()
