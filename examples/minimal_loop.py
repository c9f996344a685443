"""A whole training loop from the client alone, to copy and change: several prompts with their own answers, by GRPO.

    python examples/minimal_loop.py

It trains on the embedded service in about 10 seconds. The task fits the embedded model: it sees only the last two
tokens (bytes), so the prompts differ there. It begins with random letters, so the reward counts right letters.
"""

import sys
from pathlib import Path

if (Path(__file__).resolve().parents[1] / "whitney_loop" / "__init__.py").is_file():  # a clone, perhaps not installed
    sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from whitney_loop import (
    WhitneyClient,
    adamw_optimizer,
    all_zero,
    check_payload,
    forward_backward_payload,
    group_mean_advantages,
    lora_run,
    result_sampler_id,
    rl_datum,
    sample_request,
    training_session,
)
from whitney_loop.local import serve

MODEL, PROVIDER, LOSS_FUNCTION = "byte-lm", "modal", "importance_sampling"
ANSWERS = {"in:": "out", "dry:": "wet", "hot:": "ice"}  # prompt: answer
CYCLES, SAMPLES_PER_PROMPT, MAX_TOKENS = 60, 32, 3
OPTIMIZER = adamw_optimizer(0.1)  # a learning rate for the embedded model; 1e-5 is a start for a real one


def decode(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode(errors="replace")  # 256 is the end


def reward(text: str, answer: str) -> float:
    """Return the share of letters that are right, 0…1."""
    return sum(a == b for a, b in zip(text, answer, strict=False)) / len(answer)


def train(client: WhitneyClient, run_id: str) -> None:
    requests = [sample_request(q.encode(), num_samples=SAMPLES_PER_PROMPT, max_tokens=MAX_TOKENS) for q in ANSWERS]
    for cycle in range(CYCLES):
        # 1. Sample: a group of completions for each prompt, from the weights as they are now.
        sampler_id = result_sampler_id(client.run_operation(run_id, "save_weights_for_sampler", {}))
        samples = client.sampler_operations(run_id, sampler_id, "sample", requests)

        # 2. Score: a reward for each completion, and an advantage from the rewards of its group.
        data = []
        for (question, answer), request, sample in zip(ANSWERS.items(), requests, samples, strict=True):
            texts = [decode(sequence["tokens"]) for sequence in sample["sequences"]]
            rewards = [reward(text, answer) for text in texts]
            print(f"cycle {cycle}  {question} {texts[0]!a}  mean reward {sum(rewards) / len(rewards):.2f}")
            advantages = group_mean_advantages(rewards, normalize_std=True)
            if not all_zero(advantages):  # equal rewards teach nothing
                prompt = request["prompt"]["token_ids"]
                for sequence, advantage in zip(sample["sequences"], advantages, strict=True):
                    data.append(rl_datum(prompt, sequence["tokens"], sequence["logprobs"], advantage))

        # 3. Step: the gradient of the loss, then one update of the weights.
        if data:
            payload = forward_backward_payload(data, LOSS_FUNCTION)
            check_payload(payload, PROVIDER)  # mistakes are found here, before they are billed
            client.run_operation(run_id, "forward_backward", payload)
            client.run_operation(run_id, "optim_step", {"optimizer": OPTIMIZER})
    client.run_operation(run_id, "save_state", {})
    print(client.run_operation(run_id, "export_lora", {}))


if __name__ == "__main__":
    with serve() as service:  # on Whitney instead: client = WhitneyClient()
        client = WhitneyClient(service.base_url, service.api_key)
        with training_session(client, provider=PROVIDER) as session_id:
            with lora_run(client, session_id, model=MODEL, seed=2) as run_id:
                train(client, run_id)
