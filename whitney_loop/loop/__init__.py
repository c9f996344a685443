"""What every training loop needs around the client: options, opening and ending, data, metrics, resumption.

``examples/rl_loop.py`` shows how it is used: ``parse_options`` reads the command line into a dataclass of options,
``run_training`` opens a run and closes it on every exit, and the loop's own ``train`` calls the client.
"""

from whitney_loop.loop.cost import distillation_cost, evaluation_cost, rl_cost, sft_cost
from whitney_loop.loop.cycle import Cycle
from whitney_loop.loop.evaluation import Evaluation, read_held_out
from whitney_loop.loop.metrics import mean_loss, merged_results, trained_tokens
from whitney_loop.loop.options import REQUIRED, LoopOptions, UsageError, option, parse_options
from whitney_loop.loop.prompts import (
    Request,
    fingerprint,
    notes_on_groups,
    read_requests,
    requests_of_cycle,
    write_prompts,
)
from whitney_loop.loop.report import formatted, say
from whitney_loop.loop.running import Work, run_training
from whitney_loop.loop.samples import Texts
from whitney_loop.loop.supervised import batch_of_step, evaluation_payloads, read_examples, steps_in, train_on_examples
from whitney_loop.loop.training import Training
from whitney_loop.loop.user_loss import UserLoss, load_user_loss

__all__ = [
    "REQUIRED",
    "Cycle",
    "Evaluation",
    "LoopOptions",
    "Request",
    "Texts",
    "Training",
    "UsageError",
    "UserLoss",
    "Work",
    "batch_of_step",
    "distillation_cost",
    "evaluation_cost",
    "evaluation_payloads",
    "fingerprint",
    "formatted",
    "load_user_loss",
    "mean_loss",
    "merged_results",
    "notes_on_groups",
    "option",
    "parse_options",
    "read_examples",
    "read_held_out",
    "read_requests",
    "requests_of_cycle",
    "rl_cost",
    "run_training",
    "say",
    "sft_cost",
    "steps_in",
    "train_on_examples",
    "trained_tokens",
    "write_prompts",
]
