"""Each file of examples/algorithms gives exactly the payload of its formula, and learns on the embedded service."""

import importlib
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from loop_runs import EXAMPLES, check_refused, metrics_of, training_on
from whitney_loop import LOSS_SUPPORT, NoGradientSignal, WhitneyClient, check_payload, sft_datum

FILES = sorted(path.stem for path in (EXAMPLES / "algorithms").glob("*.py"))
sys.path.insert(0, str(EXAMPLES))

# One fixed sample: tokens, logprobs and rewards.
PROMPT = [7, 8]
TOKENS = [[11, 12], [13], [14, 15, 16]]
LOGPROBS = [[-0.5, -1.0], [-2.0], [-0.1, -0.2, -0.3]]
REFERENCE = [[-0.7, -0.9], [-1.0], [-0.1, -0.6, -0.2]]
VALUES = [[0.25, 0.5], [0.75], [0.5, 0.25, 0.0]]
REWARDS = [1.0, 0.0, 0.5]
LENGTHS = [2, 1, 3]

# By hand: the mean is 0.5, the population deviation the root of 1/6.
CENTRED = [0.5, -0.5, 0.0]
NORMED = [0.5 * math.sqrt(6), -0.5 * math.sqrt(6), 0.0]


def whole(per_sequence):
    return [[value] * length for value, length in zip(per_sequence, LENGTHS, strict=True)]


def soft(beta):
    baseline = beta * math.log((math.exp(1 / beta) + math.exp(0) + math.exp(0.5 / beta)) / 3)
    return [reward - baseline for reward in REWARDS]


def penalised(rows, coefficient):
    return [
        [advantage - coefficient * (q - r) for advantage, q, r in zip(row, sampled, reference, strict=True)]
        for row, sampled, reference in zip(rows, LOGPROBS, REFERENCE, strict=True)
    ]


def standardised(rows):
    flat = [value for row in rows for value in row]
    mean = sum(flat) / len(flat)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in flat) / len(flat))
    return [[(value - mean) / deviation for value in row] for row in rows]


def shaped(coefficient):
    return standardised(
        [
            [reward - coefficient * sum(q - r for q, r in zip(sampled[t:], ref[t:], strict=True)) for t in range(n)]
            for reward, sampled, ref, n in zip(REWARDS, LOGPROBS, REFERENCE, LENGTHS, strict=True)
        ]
    )


# GAE by hand, gamma 1 and lambda 0.95: delta_t = V_{t+1} - V_t, the last one reward - V.
GAE = [
    [0.25 + 0.95 * 0.5, 1.0 - 0.5],
    [0.0 - 0.75],
    [-0.25 + 0.95 * (-0.25 + 0.95 * 0.5), -0.25 + 0.95 * 0.5, 0.5 - 0.0],
]

# name: (loss, advantages per token, (low, high) of the clip, config beside the clip)
EXPECTED = {
    "cispo": ("cispo", whole([advantage / 6 for advantage in NORMED]), (0.0, 1.2), {}),
    "dapo": ("ppo", whole([advantage / 6 for advantage in NORMED]), (0.8, 1.28), {}),
    "dppo": ("dppo", whole(NORMED), None, {"delta_low": 0.2, "delta_high": 0.2}),
    "dr_grpo": ("ppo", whole(CENTRED), (0.8, 1.2), {}),
    "dro": ("dro", whole(soft(0.5)), None, {"beta": 0.5}),
    "grpo_kl": ("ppo", penalised(whole(NORMED), 0.04), (0.8, 1.2), {}),
    "gspo": ("gspo", whole([NORMED[0] / 2, NORMED[1], 0.0]), (1 - 3e-4, 1 + 4e-4), {}),
    "length_normalized": ("ppo", whole([NORMED[0] / 2, NORMED[1], 0.0]), (0.8, 1.2), {}),
    "ppo": ("ppo", whole(NORMED), (0.8, 1.2), {}),
    "ppo_critic": ("ppo", standardised(GAE), (0.8, 1.2), {}),
    "reinforce_pp": ("ppo", shaped(0.01), (0.8, 1.2), {}),
    "reinforce_pp_baseline": ("ppo", penalised(standardised(whole(CENTRED)), 0.01), (0.8, 1.2), {}),
    "rloo": ("importance_sampling", whole([1 - 0.25, 0 - 0.75, 0.5 - 0.5]), None, {}),
}
PROVIDERS = [
    (name, provider)
    for name in FILES
    for provider in sorted(LOSS_SUPPORT)
    if importlib.import_module(f"algorithms.{name}").LOSS_FUNCTION in LOSS_SUPPORT[provider]
]
UPDATES = dict.fromkeys(FILES, 4) | {"rloo": 1}


class FixedClient:
    """Answers the further requests of a build_loss: reference logprobs, and a critic's operations."""

    def __init__(self):
        self.asked = []

    def sampler_operations(self, run_id, sampler_id, kind, payloads):
        return [self.sampler_operation(run_id, sampler_id, kind, payload) for payload in payloads]

    def sampler_operation(self, run_id, sampler_id, kind, payload):
        self.asked.append((kind, run_id, sampler_id))
        index = [[*PROMPT, *tokens] for tokens in TOKENS].index(payload["input"]["token_ids"])
        return {"logprobs": [None, -9.0, *REFERENCE[index]]}

    def run_operation(self, run_id, kind, payload):
        self.asked.append((kind, run_id, payload))
        return {"outputs": [{"values": [9.0, *values]} for values in VALUES], "loss": 1.5}


def second_run(name, **_):
    return SimpleNamespace(run_id=f"run-{name}", sampler_id=f"smp-{name}")


def context(provider, reward=lambda tokens: REWARDS[TOKENS.index(tokens)]):
    """``reward`` is that of the tokens of a completion."""
    return SimpleNamespace(
        reward=lambda sequence, request: reward(sequence["tokens"]),
        client=FixedClient(), run_id="run-1", sampler_id="smp-0", session_id="ses-1", model="m", provider=provider,
        metrics={}, state={}, second_run=second_run,
    )  # fmt: skip


def test_an_empty_completion_has_no_term_even_after_a_prompt_of_one_token():
    answers = {(7, 5, 6): [-0.5, -0.25], (7, 5): [-0.5], (7,): []}
    for name, provider in PROVIDERS:
        module = importlib.import_module(f"algorithms.{name}")
        ctx = context(provider, lambda tokens: float(len(tokens)))
        ctx.client.sampler_operation = lambda run, sampler, kind, payload: {
            "logprobs": [None, *answers[tuple(payload["input"]["token_ids"])]]
        }
        ctx.client.run_operation = lambda run, kind, payload: {"outputs": [{"values": [0.5, 0.25]}, {"values": [0.5]}]}
        sequences = [{"tokens": tokens, "logprobs": [-1.0] * len(tokens)} for tokens in ([5, 6], [], [5])]
        request = {"prompt": {"token_ids": [7]}, "num_samples": 3, "sampling_params": {"max_tokens": 2}}
        payload = module.build_loss({"sequences": sequences}, 0, request, ctx)
        check_payload(payload, provider)
        assert [datum["input"]["token_ids"] for datum in payload["data"]] == [[7, 5], [7]], name


def build(name, provider, ctx=None):
    module = importlib.import_module(f"algorithms.{name}")
    sequences = [
        {"tokens": tokens, "logprobs": logprobs, "stop_reason": "stop"}
        for tokens, logprobs in zip(TOKENS, LOGPROBS, strict=True)
    ]
    request = {"prompt": {"token_ids": PROMPT}, "num_samples": 3, "sampling_params": {"max_tokens": 3}}
    return module.build_loss({"sequences": sequences}, 0, request, ctx or context(provider))


def test_every_file_has_its_formula_here():
    assert sorted(EXPECTED) == FILES


@pytest.mark.parametrize(("name", "provider"), PROVIDERS)
def test_one_fixed_sample_gives_exactly_the_payload_of_the_formula(name, provider):
    loss, advantages, clip, config = EXPECTED[name]
    payload = build(name, provider)
    check_payload(payload, provider)
    if clip and provider == "modal":
        config = config | {"clip_low_threshold": clip[0], "clip_high_threshold": clip[1]}
    assert (payload["loss_function"], payload["loss_config"]) == (loss, config)
    for datum, tokens, logprobs, per_token in zip(payload["data"], TOKENS, LOGPROBS, advantages, strict=True):
        expected = {
            "target_tokens": [PROMPT[1], *tokens],
            "weights": [0.0, *[1.0] * len(tokens)],
            "logprobs": [0.0, *logprobs],
            "advantages": pytest.approx([0.0, *per_token], abs=1e-12),
        }
        if clip and provider == "tinker":
            expected["clip_low_threshold"] = [0.0, *[clip[0]] * len(tokens)]
            expected["clip_high_threshold"] = [0.0, *[clip[1]] * len(tokens)]
        assert datum["input"]["token_ids"] == [*PROMPT, *tokens][:-1]
        assert {name: tensor["values"] for name, tensor in datum["loss_inputs"].items()} == expected


@pytest.mark.parametrize(("name", "provider"), PROVIDERS)
def test_a_uniform_group_has_no_gradient_signal(name, provider):
    if name in ("ppo_critic", "dapo"):
        pytest.skip("a critic's values tell equal rewards apart; dapo has a test of its own")
    with pytest.raises(NoGradientSignal):
        build(name, provider, context(provider, lambda tokens: 0.1))


@pytest.mark.parametrize("name", ["grpo_kl", "reinforce_pp", "reinforce_pp_baseline"])
def test_the_reference_is_a_second_run(name):
    ctx = context("modal")
    for _ in range(2):
        build(name, "modal", ctx)
    assert ctx.client.asked == [("logprobs", "run-reference", "smp-reference")] * 6


def test_the_critic_gives_values_and_learns_returns_by_several_updates():
    ctx = context("modal")
    build("ppo_critic", "modal", ctx)
    assert all(run_id == "run-critic" for _, run_id, _ in ctx.client.asked)
    (kind, _, asked), *updates = ctx.client.asked
    assert (kind, asked["loss_function"], asked["loss_config"]) == ("forward", "ppo_critic", {})
    assert asked["data"] == [sft_datum(PROMPT, tokens) for tokens in TOKENS]
    module = importlib.import_module("algorithms.ppo_critic")
    step = ("optim_step", "run-critic", module.CRITIC_OPTIMIZER)
    assert updates == [updates[0], step] * 4 and updates[0][0] == "forward_backward"
    assert module.CRITIC_OPTIMIZER["optimizer"]["learning_rate"] > 0
    payload = updates[0][2]
    assert (payload["loss_function"], payload["loss_config"]) == ("ppo_critic", {"value_clip": 0.2})
    for datum, values, gained in zip(payload["data"], VALUES, GAE, strict=True):
        tensors = {name: tensor["values"] for name, tensor in datum["loss_inputs"].items()}
        assert tensors["values"] == [0.0, *values]
        assert tensors["returns"] == pytest.approx([0.0, *(a + v for a, v in zip(gained, values, strict=True))])


def test_the_critic_is_asked_once_a_cycle_and_advantages_are_normalised_over_all_groups():
    module = importlib.import_module("algorithms.ppo_critic")
    ctx = context("modal")
    sequences = [{"tokens": tokens, "logprobs": sampled} for tokens, sampled in zip(TOKENS, LOGPROBS, strict=True)]
    samples = [{"sequences": sequences[:1]}, {"sequences": sequences[1:]}]
    payload = module.build_batch_loss(
        samples, 0, [{"prompt": {"token_ids": prompt}} for prompt in (PROMPT, [9, 8])], ctx
    )
    assert [kind for kind, _, _ in ctx.client.asked] == ["forward", *["forward_backward", "optim_step"] * 4]
    asked = [sft_datum(PROMPT, TOKENS[0]), sft_datum([9, 8], TOKENS[1]), sft_datum([9, 8], TOKENS[2])]
    assert ctx.client.asked[0][2]["data"] == asked
    assert ctx.metrics["reward"] == REWARDS
    for datum, per_token in zip(payload["data"], standardised(GAE), strict=True):
        assert datum["loss_inputs"]["advantages"]["values"] == pytest.approx([0.0, *per_token])


def test_a_critic_without_outputs_is_an_error():
    ctx = context("modal")
    ctx.client.run_operation = lambda run_id, kind, payload: {}
    with pytest.raises(ValueError, match="forward of the critic gave 0 outputs for 3 data"):
        build("ppo_critic", "modal", ctx)


BATCH = [([1, 2], [[10, 11], [30]]), ([3], [[50], [50, 51]]), ([4, 5], [[10], [90, 1, 2]])]  # prompt, completions


def build_batch(name, groups):
    """The payload and the context; the reward is the first token / 100, and each token has a KL of 0.5."""
    module = importlib.import_module(f"algorithms.{name}")
    samples = [
        {"sequences": [{"tokens": tokens, "logprobs": [-1.0] * len(tokens)} for tokens in completions]}
        for _, completions in groups
    ]
    ctx = context("modal", lambda tokens: (tokens or [0])[0] / 100)
    ctx.client.sampler_operations = lambda run_id, sampler_id, kind, payloads: [
        {"logprobs": [None, *[-1.5] * (len(payload["input"]["token_ids"]) - 1)]} for payload in payloads
    ]
    payload = module.build_batch_loss(samples, 0, [{"prompt": {"token_ids": prompt}} for prompt, _ in groups], ctx)
    check_payload(payload, "modal")
    return payload, ctx


def sampled_advantages(payload):
    tensors = [datum["loss_inputs"] for datum in payload["data"]]
    return [
        [a for a, weight in zip(of["advantages"]["values"], of["weights"]["values"], strict=True) if weight]
        for of in tensors
    ]


def test_reinforce_pp_normalises_reward_and_kl_over_all_completions_of_the_batch():
    payload, ctx = build_batch("reinforce_pp", BATCH)
    by_hand = [
        [0.1 - 0.01, 0.1 - 0.005], [0.3 - 0.005], [0.5 - 0.005], [0.5 - 0.01, 0.5 - 0.005],
        [0.1 - 0.005], [0.9 - 0.015, 0.9 - 0.01, 0.9 - 0.005],
    ]  # fmt: skip
    for row, expected in zip(sampled_advantages(payload), standardised(by_hand), strict=True):
        assert row == pytest.approx(expected)
    assert ctx.metrics == {"reward": [0.1, 0.3, 0.5, 0.5, 0.1, 0.9]}


def test_reinforce_pp_needs_no_groups_and_gets_no_signal_from_empty_completions():
    payload, _ = build_batch("reinforce_pp", [([1], [[10]]), ([2], [[30]])])
    assert sampled_advantages(payload) == [[pytest.approx(-1)], [pytest.approx(1)]]
    with pytest.raises(NoGradientSignal, match="every completion of the batch has the same reward"):
        build_batch("reinforce_pp", [([1], [[10], []]), ([2], [[10, 11]])])


def test_reinforce_pp_baseline_centres_each_group_leaves_out_a_uniform_one_and_adds_the_kl_last():
    payload, ctx = build_batch("reinforce_pp_baseline", BATCH)
    by_hand = standardised([[-0.1, -0.1], [0.1], [-0.4], [0.4, 0.4, 0.4]])
    for row, expected in zip(sampled_advantages(payload), by_hand, strict=True):
        assert row == pytest.approx([advantage - 0.01 * 0.5 for advantage in expected])
    assert ctx.metrics["groups/uniform_frac"] == pytest.approx(1 / 3)
    assert ctx.metrics["reward"] == [0.1, 0.3, 0.5, 0.5, 0.1, 0.9]


def test_dapo_penalises_a_completion_that_is_nearly_too_long_by_up_to_1(monkeypatch):
    module = importlib.import_module("algorithms.dapo")
    assert [module.overlong_penalty([1] * length, 3) for length in range(4)] == [0, 0, 0, 0]
    monkeypatch.setattr(module, "OVERLONG_TOKENS", 2)
    assert [module.overlong_penalty([1] * length, 3) for length in range(4)] == [0, 0, -0.5, -1]
    ctx = context("modal")
    build("dapo", "modal", ctx)
    assert ctx.metrics["reward"] == [1.0 - 0.5, 0.0, 0.5 - 1.0]


def test_dapo_resamples_a_uniform_group_with_new_seeds_a_limited_number_of_times():
    module = importlib.import_module("algorithms.dapo")
    ctx = context("modal", lambda tokens: 0.5)
    seeds = []

    def sample_again(run_id, sampler_id, kind, payload):
        seeds.append(payload["sampling_params"]["seed"])
        return {"sequences": [{"tokens": [1], "logprobs": [-1.0]}] * 3}

    ctx.client.sampler_operation = sample_again
    request = {"prompt": {"token_ids": PROMPT}, "num_samples": 3, "sampling_params": {"max_tokens": 3}}
    for cycle in range(2):
        with pytest.raises(NoGradientSignal):
            module.build_loss(sample_again(0, 0, 0, {"sampling_params": {"seed": -1}}), cycle, request, ctx)
    assert len(set(seeds) - {-1}) == 2 * module.MOST_RESAMPLES
    assert request["sampling_params"] == {"max_tokens": 3}


@pytest.mark.parametrize("own_seed", [None, 0, 1, 5, 2**63 - 1])
def test_dapo_trains_on_the_resampled_group(own_seed):
    module = importlib.import_module("algorithms.dapo")
    ctx, asked = context("modal", lambda tokens: float(tokens[0])), []

    def sample_again(run_id, sampler_id, kind, payload):
        asked.append((run_id, sampler_id, kind, payload["sampling_params"]["seed"]))
        return {"sequences": [{"tokens": [token], "logprobs": [-0.5]} for token in (3, 4)]}

    ctx.client.sampler_operation = sample_again
    seed = {} if own_seed is None else {"seed": own_seed}
    request = {"prompt": {"token_ids": PROMPT}, "num_samples": 2, "sampling_params": {"max_tokens": 3, **seed}}
    uniform = {"sequences": [{"tokens": [9], "logprobs": [-1.0]}] * 2}
    payload = module.build_loss(uniform, 0, request, ctx)
    assert [datum["loss_inputs"]["target_tokens"]["values"][-1] for datum in payload["data"]] == [3, 4]
    assert [datum["loss_inputs"]["advantages"]["values"][-1] for datum in payload["data"]] == [-0.5, 0.5]
    assert [call[:3] for call in asked] == [("run-1", "smp-0", "sample")]
    assert asked[0][3] != own_seed and 0 <= asked[0][3] < 2**31
    assert ctx.metrics == {"reward": [3.0, 4.0], "resamples": 1}


def test_equal_advantages_from_the_critic_give_no_signal():
    module = importlib.import_module("algorithms.ppo_critic")
    ctx = context("modal", lambda tokens: 1.0)
    ctx.client.run_operation = lambda run, kind, payload: {"outputs": [{"values": [0.0, 0.5]}] * 2}
    sequences = [{"tokens": [3], "logprobs": [-1.0]}] * 2
    request = {"prompt": {"token_ids": PROMPT}, "num_samples": 2, "sampling_params": {"max_tokens": 1}}
    with pytest.raises(NoGradientSignal):
        module.build_loss({"sequences": sequences}, 0, request, ctx)


ONE_PROVIDER = [name for name in FILES if [file for file, _ in PROVIDERS].count(name) == 1]


@pytest.mark.parametrize("name", ONE_PROVIDER)
def test_a_provider_without_the_loss_is_refused_before_anything_is_created(name, run_loop, tmp_path):
    [provider] = {"modal", "tinker"} - {provider for file, provider in PROVIDERS if file == name}
    done = run_loop("rl_loop", "--build-loss", f"algorithms.{name}:build_loss", "--provider", provider, "--local")
    check_refused(done, f"not advertised by {provider}")
    assert list(tmp_path.iterdir()) == []


# Learning


def trained(name, provider, seed, rank, folder):
    """Return the rewards of all cycles, the clip fractions, and the adapter. A low rank only saves time."""
    arguments = ["--build-loss", f"algorithms.{name}:build_loss", "--provider", provider, "--seed", str(seed)]
    arguments += ["--local", "--cycles", "40", "--learning-rate", "0.1", "--updates", str(UPDATES[name])]
    arguments += ["--lora-rank", str(rank), "--metrics", "metrics.jsonl"]
    command = [sys.executable, str(EXAMPLES / "rl_loop.py"), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [adapter] = (folder / ".whitney_local" / "adapters").glob("*/adapter_model.safetensors")
    cycles = metrics_of(folder / "metrics.jsonl")
    rewards = [cycle["reward/mean"] for cycle in cycles]
    return rewards, [cycle.get("clip_frac", 0.0) for cycle in cycles], adapter.read_bytes()


def train_all(jobs, tmp_path_factory):
    """Train two at a time, for two cores."""
    folders = [tmp_path_factory.mktemp("-".join(map(str, job))) for job in jobs]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(jobs, pool.map(lambda job, folder: trained(*job, folder), jobs, folders), strict=True))


def assert_learned(results):
    for (name, provider, seed, _), (rewards, clip_fractions, _) in results.items():
        assert len(rewards) == 40
        gain = sum(rewards[-5:]) / 5 - rewards[0]
        assert gain >= 0.3, f"{name} on {provider}, seed {seed}: gained {gain:.3f}"
        if name in ("ppo", "cispo", "gspo", "dppo", "dapo"):
            assert max(clip_fractions) > 0, f"{name} on {provider}, seed {seed} never clipped"


@pytest.mark.learns
def test_every_file_learns_and_no_two_end_with_the_same_adapter(tmp_path_factory):
    jobs = [(name, next(provider for file, provider in PROVIDERS if file == name), 1, 8) for name in FILES]
    results = train_all(jobs, tmp_path_factory)
    assert_learned(results)
    assert len({adapter for _, _, adapter in results.values()}) == len(FILES)


@pytest.mark.learns
@pytest.mark.slow
def test_every_file_learns_on_every_provider_for_every_seed(tmp_path_factory):
    jobs = [(name, provider, seed, 32) for name, provider in PROVIDERS for seed in (1, 2, 3)]
    results = train_all(jobs, tmp_path_factory)
    assert_learned(results)
    for seed in (1, 2, 3):
        adapters = {name: results[name, provider, seed, 32][2] for name, provider in PROVIDERS}
        assert len(set(adapters.values())) == len(FILES)


@pytest.mark.long
def test_a_critic_learns_is_clipped_and_leaves_no_run_open_beside_the_policys(run_loop, remote, tmp_path):
    """The critic's run is a second one of the same model: in the end both have finished, and the session is closed."""
    arguments = ["--build-loss", "algorithms.ppo_critic:build_loss", "--model", "m", "--lora-rank", "2", "--seed", "1"]
    arguments += ["--sample-json", EXAMPLES / "sample.json", "--cycles", "4", "--metrics", "critic.jsonl"]
    done = run_loop("rl_loop", *arguments, **training_on(remote))
    assert done.returncode == 0, done.stderr
    session = WhitneyClient(remote.base_url, remote.api_key).session(done.summary["session_id"])
    assert (session["status"], [run["status"] for run in session["runs"]]) == ("closed", ["finished", "finished"])
    assert [run["model"] for run in session["runs"]] == ["m", "m"]
    cycles = metrics_of(tmp_path / "critic.jsonl")
    losses = [cycle["critic/loss"] for cycle in cycles]
    assert losses[-1] < losses[0] / 2
    assert any(cycle.get("critic/clip_frac", 0) > 0 for cycle in cycles)


@pytest.mark.parametrize(("name", "provider"), PROVIDERS)
def test_only_empty_completions_give_no_signal(name, provider):
    module = importlib.import_module(f"algorithms.{name}")
    empty = {"tokens": [], "logprobs": [], "stop_reason": "stop"}
    request = {"prompt": {"token_ids": PROMPT}, "num_samples": 2, "sampling_params": {"max_tokens": 3}}
    ctx = context(provider, lambda tokens: 0.5)
    ctx.client.sampler_operation = lambda *_: {"sequences": [empty, empty]}  # of a resample
    with pytest.raises(NoGradientSignal):
        module.build_loss({"sequences": [empty, empty]}, 0, request, ctx)
