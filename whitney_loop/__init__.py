"""A client for Whitney's training API that needs only the standard library, and the helpers that build its JSON.

``examples/rl_loop.py`` is the reference loop; ``whitney_loop.local`` is a service to rehearse on.
"""

from whitney_loop.advantages import (
    all_zero,
    batch_normalize,
    generalized_advantages,
    group_mean_advantages,
    kl_adjust_advantages,
    kl_shaped_returns,
    leave_one_out_baseline,
    length_normalize,
    soft_advantages,
)
from whitney_loop.build_loss import BuildLoss, LoopContext, NoGradientSignal, SecondRun, clip_arguments, policy_payload
from whitney_loop.client import WhitneyClient
from whitney_loop.datums import (
    Datum,
    Tensor,
    completion_logprobs,
    completion_values,
    critic_datum,
    rl_datum,
    sft_datum,
    tensor,
    trajectory_datum,
)
from whitney_loop.errors import (
    ConfigurationError,
    OperationFailed,
    OperationTimeout,
    RequestRejected,
    RunBroken,
    ServiceUnavailable,
    UnexpectedResponse,
    WhitneyError,
)
from whitney_loop.lifecycle import lora_run, training_session
from whitney_loop.losses import LOSS_CONFIG_KEYS, LOSS_SUPPORT, require_advertised_loss, require_loss_config
from whitney_loop.operations import PendingOperation
from whitney_loop.payloads import (
    adamw_optimizer,
    check_payload,
    forward_backward_payload,
    logprobs_request,
    sample_request,
)
from whitney_loop.results import result_sampler_id, result_sequences
from whitney_loop.version import __version__ as __version__

__all__ = [
    "LOSS_CONFIG_KEYS",
    "LOSS_SUPPORT",
    "BuildLoss",
    "ConfigurationError",
    "Datum",
    "LoopContext",
    "NoGradientSignal",
    "OperationFailed",
    "OperationTimeout",
    "PendingOperation",
    "RequestRejected",
    "RunBroken",
    "SecondRun",
    "ServiceUnavailable",
    "Tensor",
    "UnexpectedResponse",
    "WhitneyClient",
    "WhitneyError",
    "adamw_optimizer",
    "all_zero",
    "batch_normalize",
    "check_payload",
    "clip_arguments",
    "completion_logprobs",
    "completion_values",
    "critic_datum",
    "forward_backward_payload",
    "generalized_advantages",
    "group_mean_advantages",
    "kl_adjust_advantages",
    "kl_shaped_returns",
    "leave_one_out_baseline",
    "length_normalize",
    "logprobs_request",
    "lora_run",
    "policy_payload",
    "require_advertised_loss",
    "require_loss_config",
    "result_sampler_id",
    "result_sequences",
    "rl_datum",
    "sample_request",
    "sft_datum",
    "soft_advantages",
    "tensor",
    "training_session",
    "trajectory_datum",
]
