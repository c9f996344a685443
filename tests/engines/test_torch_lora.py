"""The PyTorch engine, on tiny random models: against PyTorch's own autograd, PEFT alone, and the contract."""

from __future__ import annotations

import json
import math
import subprocess
import threading

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from local.byte_payloads import tensor  # noqa: E402
from loop_runs import ROOT  # noqa: E402
from processes import contract_command  # noqa: E402
from whitney_loop import RequestRejected, WhitneyClient, lora_run, training_session  # noqa: E402
from whitney_loop.local import load_backend, serve  # noqa: E402
from whitney_loop.local.__main__ import main  # noqa: E402
from whitney_loop.local.engine import EngineError  # noqa: E402
from whitney_loop.local.objectives import OBJECTIVES  # noqa: E402

pytestmark = [  # of PEFT and transformers about each other
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

ENGINE = "engines.torch_lora:make"
ADAMW = {"learning_rate": 0.05, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01, "grad_clip_norm": 0.0}
TEXTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21], [30, 31, 32, 33]]


@pytest.fixture(scope="module")
def made(tiny):
    """A backend of a kind of model; the options are those of ``make``. Backends without options are shared."""
    shared = {}

    def make(kind="qwen3", **options):
        key = kind, *options.items()
        if key not in shared:
            texts = [f"{name}={str(value).lower()}" for name, value in options.items()]
            shared[key] = load_backend(ENGINE, [f"model={tiny(kind)}", *texts])
        return shared[key]

    return make


def new_run(backend, rank=4, seed=1, steps=0):
    run = backend.new_run(rank=rank, seed=seed, proceed=lambda: None)
    for _ in range(steps):  # so that B is not 0, and A has a gradient
        run.forward_backward(payload("cross_entropy"))
        run.optim_step(ADAMW)
    return run


def datum(text):
    """What every loss finds in a datum; ratios and values are on both sides of their clips."""
    n = len(text)
    tensors = {
        "weights": [0.0] + [1.0 + i / 4 for i in range(1, n)],
        "logprobs": [-5.0 - (i % 3) / 2 for i in range(n)],
        "advantages": [(-1.0) ** i * (1 + i / 3) for i in range(n)],
        "values": [(-1.0) ** i for i in range(n)],
        "returns": [i / 2 for i in range(n)],
    }
    inputs = {name: tensor(values) for name, values in tensors.items()}
    inputs["target_tokens"] = tensor([token + 1 for token in text], "int64")
    return {"input": {"token_ids": text}, "loss_inputs": inputs}


def payload(loss, texts=TEXTS, **config):
    return {"data": [datum(text) for text in texts], "loss_function": loss, "loss_config": config}


def request(prompt, num_samples=2, **params):
    sampling = {"max_tokens": 8, "temperature": 1.0, "top_p": 1.0, "top_k": -1} | params
    return {"prompt": {"token_ids": prompt}, "num_samples": num_samples, "sampling_params": sampling}


def near(numbers, within=1e-5):
    return pytest.approx(numbers, rel=within, abs=within)


# Gradients: the same adapter in PEFT, and losses that are written here once more, for autograd


def peft_model(run, kind, tiny, folder):
    folder.mkdir()
    run.export_lora(folder, base_model=tiny(kind))
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny(kind))
    return peft.PeftModel.from_pretrained(model, folder, is_trainable=True).eval()


def peft_logprobs(model, text, targets):
    output = model(input_ids=torch.tensor([text]), output_hidden_states=True)
    logprobs = torch.log_softmax(output.logits[0], dim=-1)[torch.arange(len(text)), targets]
    return logprobs, output.hidden_states[-1][0]


def clamped_surrogate(ratio, a, low=0.8, high=1.2):
    return torch.minimum(ratio * a, ratio.clamp(low, high) * a)


def torch_loss(loss, p, values, inputs):
    w, q, a = inputs["weights"], inputs["logprobs"], inputs["advantages"]
    ratio = torch.exp(p - q)
    if loss == "cross_entropy":
        return -(w * p).sum()
    if loss == "importance_sampling":
        return -(w * ratio * a).sum()
    if loss == "ppo":
        return -(w * clamped_surrogate(ratio, a)).sum()
    if loss == "cispo":
        return -(w * ratio.clamp(0.8, 1.2).detach() * p * a).sum()
    if loss == "gspo":
        sequence_ratio = torch.exp((p - q)[w != 0].mean()).detach() * torch.exp(p - p.detach())
        return -(w * clamped_surrogate(sequence_ratio, a)).sum()
    if loss == "dro":
        return -(w * (p * a - 0.025 * (p - q) ** 2)).sum()
    if loss == "dppo":
        moved = p.exp() - q.exp()
        kept = ~(((a > 0) & (moved > 0.001)) | ((a < 0) & (moved < -0.001)))
        return -(w * ratio * a * kept.detach()).sum()
    old, returns = inputs["values"], inputs["returns"]
    clipped = old + (values - old).clamp(-0.2, 0.2)
    return (w / 2 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)).sum()


CONFIGS = {"dppo": {"delta_low": 0.001, "delta_high": 0.001}, "ppo_critic": {"value_clip": 0.2}}


@pytest.mark.parametrize("loss", OBJECTIVES)
def test_gradient_and_loss_are_those_of_autograd(loss, made, tiny, tmp_path):
    run = new_run(made(), steps=2)
    model = peft_model(run, "qwen3", tiny, tmp_path / "adapter")
    head = torch.linspace(-1, 1, 32, requires_grad=True)
    run._weights[-32:] = head.detach()
    result = run.forward_backward(payload(loss, **CONFIGS.get(loss, {})))

    total = torch.tensor(0.0)
    for text in TEXTS:
        inputs = {name: torch.tensor(each["values"]) for name, each in datum(text)["loss_inputs"].items()}
        p, hidden = peft_logprobs(model, text, inputs["target_tokens"])
        total = total + torch_loss(loss, p, hidden @ head, inputs)
    total.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if "lora_" in name}
    assert result["loss"] == result["metrics"]["loss:sum"] == near(total.item())
    found = made().new_run(rank=4, seed=0, proceed=lambda: None)._base.adapter(run._gradient, 4)
    largest = max(float(each.abs().max()) for each in expected.values())
    assert largest > 0.01
    for name, gradient in expected.items():
        own = found[name.removeprefix("base_model.model.").replace(".default.weight", "")]
        assert torch.allclose(own, gradient, atol=1e-5 * max(largest, 1.0))
    if loss == "ppo_critic":
        assert torch.allclose(found["value_head"], head.grad, atol=1e-4)


def test_gradient_checkpointing_gives_the_same_gradient(made):
    plain, checkpointed = (new_run(made(gradient_checkpointing=flag), steps=1) for flag in (False, True))
    norms = []
    for run in (plain, checkpointed):
        run.forward_backward(payload("ppo"))
        norms.append(run.optim_step(ADAMW)["grad_norm"])
    assert norms[0] == near(norms[1])
    assert checkpointed.sampler().sample(request([1, 2]), "s") == plain.sampler().sample(request([1, 2]), "s")


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
def test_peft_alone_loads_the_exported_adapter_and_gives_the_same_logprobs(kind, made, tiny, tmp_path):
    run = new_run(made(kind), steps=3)
    model = peft_model(run, kind, tiny, tmp_path / "adapter")
    text = TEXTS[0]
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == tiny(
        kind
    )
    with torch.no_grad():
        expected, _ = peft_logprobs(model, text[:-1], text[1:])
        with model.disable_adapter():
            before, _ = peft_logprobs(model, text[:-1], text[1:])
    first, *later = run.sampler().logprobs(text)
    assert first is None
    assert later == near(expected.tolist())
    assert later != pytest.approx(before.tolist(), abs=0.1)


# A batch is what its members are alone


@pytest.mark.parametrize("loss", ["ppo", "ppo_critic"])
def test_a_batch_gives_the_outputs_and_the_gradient_of_its_data_one_by_one(loss, made):
    together, in_small_batches, singly = (new_run(made(batch_tokens=n), steps=1) for n in (4096, 8, 8))
    results = [run.forward_backward(payload(loss)) for run in (together, in_small_batches)]
    alone = [singly.forward_backward(payload(loss, [text])) for text in TEXTS]
    for result in results:
        assert result["loss"] == near(sum(each["loss"] for each in alone))
        for output, each in zip(result["outputs"], alone, strict=True):
            for name, numbers in each["outputs"][0].items():
                assert output[name] == near(numbers)
    for run in (in_small_batches, singly):
        assert torch.allclose(run._gradient, together._gradient, atol=1e-4)


REQUESTS = [
    (request([1, 2, 3], 2), "a"),
    (request([9], 3, top_p=0.5), "b"),
    (request([8, 7, 6, 5, 4], 2, max_tokens=3), "c"),
    (request([1, 2, 3], 1, temperature=0.0), "d"),
    (request([4, 4], 4, top_k=3, temperature=0.7), "e"),
]


@pytest.mark.parametrize("batch_tokens", [4096, 16])
def test_requests_sampled_together_give_what_each_gives_alone(batch_tokens, made):
    sampler = new_run(made(batch_tokens=batch_tokens), steps=1).sampler()
    together = sampler.sample_many(REQUESTS)
    for (each, seed), sequences in zip(REQUESTS, together, strict=True):
        alone = sampler.sample(each, seed)
        assert [sequence["tokens"] for sequence in sequences] == [sequence["tokens"] for sequence in alone]
        for sequence, single in zip(sequences, alone, strict=True):
            assert sequence["logprobs"] == near(single["logprobs"])
            assert sequence["stop_reason"] == single["stop_reason"]
            prompt = each["prompt"]["token_ids"]
            scored = sampler.logprobs([*prompt, *sequence["tokens"]])[len(prompt) :]
            assert sequence["logprobs"] == near(scored)


def test_text_i_of_a_request_does_not_depend_on_how_many_are_drawn(made):
    sampler = new_run(made()).sampler()
    two, five = (sampler.sample(request([1, 2], n), "s") for n in (2, 5))
    assert [sequence["tokens"] for sequence in two] == [sequence["tokens"] for sequence in five[:2]]
    assert len({tuple(sequence["tokens"]) for sequence in five}) == 5


def test_the_prompt_of_a_group_is_computed_once(made, monkeypatch):
    sampler = new_run(made()).sampler()
    computed, next_logits = [], sampler._base.next_logits

    def count(tokens, *arguments):
        computed.append(tuple(tokens.shape))
        return next_logits(tokens, *arguments)

    monkeypatch.setattr(sampler._base, "next_logits", count)
    sampler.sample_many([(request([1, 2, 3], 4, max_tokens=2), "a"), (request([5], 4, max_tokens=2), "b")])
    assert computed == [(2, 3), (8, 1)]


def test_a_stop_token_and_the_models_own_end_stop_a_text(made):
    sampler = new_run(made()).sampler()
    [greedy] = sampler.sample(request([1, 2], 1, temperature=0.0), "s")
    stop = greedy["tokens"][2]
    [stopped] = sampler.sample(request([1, 2], 1, temperature=0.0, stop=[stop]), "s")
    assert stopped["stop_reason"] == "stop"
    assert stopped["tokens"] == greedy["tokens"][: greedy["tokens"].index(stop) + 1]
    assert sampler._base.end_tokens == {256}


def test_the_shares_of_the_drawn_tokens_are_the_models_after_temperature_top_k_and_top_p(made):
    run = new_run(made())
    params = {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "max_tokens": 1}
    drawn = [sequence["tokens"][0] for sequence in run.sampler().sample(request([3], 4000, **params), "s")]
    inputs = [{"target_tokens": tensor([token], "int64"), "weights": tensor([1.0])} for token in range(260)]
    data = [{"input": {"token_ids": [3]}, "loss_inputs": each} for each in inputs]
    outputs = run.forward({"data": data, "loss_function": "cross_entropy", "loss_config": {}})["outputs"]
    logprobs = torch.tensor([output["logprobs"][0] for output in outputs])
    shares, order = (logprobs / 0.8).softmax(0).sort(descending=True)
    kept = [i for i in range(6) if shares[:i].sum() < 0.9 * shares[:6].sum()]
    expected = {int(order[i]): float(shares[i] / shares[kept].sum()) for i in kept}
    assert set(drawn) == set(expected)
    for token, share in expected.items():
        assert drawn.count(token) / 4000 == pytest.approx(share, abs=0.04)


# Runs


def losses_of(run, rounds=4):
    found = []
    for _ in range(rounds):
        found.append(run.forward_backward(payload("importance_sampling"))["loss"])
        found.append(run.optim_step(ADAMW | {"grad_clip_norm": 1.0})["grad_norm"])
        found.append(run.sampler().sample(request([1, 2]), "s"))
    return found


def test_two_runs_at_once_give_the_numbers_of_each_alone(made):
    settings = [{"rank": 8, "seed": 1}, {"rank": 4, "seed": 2}]
    alone = [losses_of(new_run(made(), **each)) for each in settings]
    found = [None, None]

    def train(index):
        found[index] = losses_of(new_run(made(), **settings[index]))

    threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone


def test_a_resumed_run_goes_on_as_the_saved_one(made, tmp_path):
    run = new_run(made(), steps=2)
    assert run.save_state(tmp_path) == 2
    resumed = new_run(made(), seed=99)
    resumed.load_state(tmp_path)
    assert losses_of(resumed) == losses_of(run)


@pytest.mark.parametrize("damage", ["truncated", "another rank", "a NaN"])
def test_a_damaged_state_is_a_value_error_and_changes_nothing(damage, made, tmp_path):
    saved = new_run(made(), rank=8 if damage == "another rank" else 4)
    if damage == "a NaN":
        saved._moment2[3] = math.nan
    saved.save_state(tmp_path)
    if damage == "truncated":
        (tmp_path / "state.safetensors").write_bytes((tmp_path / "state.safetensors").read_bytes()[:100])
    run = new_run(made())
    weights = run._weights
    with pytest.raises(ValueError):
        run.load_state(tmp_path)
    assert run._weights is weights


@pytest.mark.parametrize("fields", [{"eps": 1e-320}, {"learning_rate": 1e39}, {"weight_decay": 1e300}])
def test_a_step_to_weights_that_are_not_finite_fails_and_is_undone(fields, made):
    run, other = new_run(made(), steps=1), new_run(made(), steps=1)
    for each in (run, other):
        each.forward_backward(payload("ppo"))
    with pytest.raises(EngineError) as failed:
        run.optim_step(ADAMW | fields)
    assert failed.value.code == "non_finite_update"
    assert run.optim_step(ADAMW) == other.optim_step(ADAMW)
    assert torch.equal(run._weights, other._weights)


def test_a_loss_that_is_not_finite_adds_nothing(made):
    run, broken = new_run(made()), payload("importance_sampling")
    broken["data"][2]["loss_inputs"]["advantages"]["values"][1] = math.inf
    with pytest.raises(EngineError) as failed:
        run.forward_backward(broken)
    assert (failed.value.code, "data[2]" in str(failed.value)) == ("non_finite_loss", True)
    with pytest.raises(EngineError, match="optim_step needs a forward_backward"):
        run.optim_step(ADAMW)


@pytest.mark.parametrize(
    "failure",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        MemoryError(),
    ],
)
def test_out_of_memory_drops_the_gradient_of_that_call_alone_and_the_run_goes_on(failure, made, monkeypatch):
    backend = made(batch_tokens=7)  # each text is a batch
    run, other = new_run(backend, steps=1), new_run(backend, steps=1)
    for each in (run, other):
        each.forward_backward(payload("cross_entropy"))
    grad, calls = torch.autograd.grad, []

    def fail_second(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise failure
        return grad(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "grad", fail_second)
        with pytest.raises(EngineError, match="lower the engine's batch_tokens") as failed:
            run.forward_backward(payload("ppo"))
    assert failed.value.code == "out_of_memory"
    assert run.optim_step(ADAMW) == other.optim_step(ADAMW)
    assert torch.equal(run._weights, other._weights)


def test_proceed_is_asked_before_every_batch_and_every_token_and_its_exception_passes(made):
    class Cancelled(Exception):
        pass

    allowed = []

    def proceed():
        if not allowed:
            raise Cancelled
        allowed.pop()

    run = made(batch_tokens=7).new_run(rank=4, seed=1, proceed=proceed)
    for calls, act in [(2, lambda: run.forward_backward(payload("ppo"))), (7, lambda: sample_eight(run))]:
        allowed[:] = [True] * calls
        with pytest.raises(Cancelled):
            act()
    allowed[:] = [True] * 11
    run.forward_backward(payload("ppo"))
    sample_eight(run)
    assert not allowed


def sample_eight(run):
    run.sampler().sample(request([1], 1, temperature=0.0), "s")


# Bad input


def refused_start(capsys, *options):
    arguments = ["--port", "0", "--engine", ENGINE]
    for option in options:
        arguments += ["--engine-option", option]
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert "Serving" not in output.out
    return output.err


def test_a_folder_without_a_model_or_with_another_one_is_refused_before_a_port_is_opened(tiny, tmp_path, capsys):
    assert "Unrecognized model" in refused_start(capsys, f"model={tmp_path}")
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    assert "Unrecognized configuration class" in refused_start(capsys, f"model={tmp_path}")
    assert "batch_tokens is 0; expected 1 or more" in refused_start(capsys, "model=x", "batch_tokens=0")
    assert "needs --engine-option model" in refused_start(capsys)


def test_a_model_that_lacks_weights_is_refused(tiny, tmp_path, capsys):
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny("qwen3"))
    kept = {name: weight for name, weight in model.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    model.save_pretrained(tmp_path, state_dict=kept)
    assert "lacks 1 weights of its model, first model.layers.1.mlp.up_proj" in refused_start(
        capsys, f"model={tmp_path}"
    )


def test_requests_beyond_the_model_are_refused_with_the_limit_and_the_value(made, tmp_path):
    backend = made()
    with serve(tmp_path, backend) as service:
        client = WhitneyClient(service.base_url, service.api_key)
        with training_session(client, provider="modal") as session_id:
            with pytest.raises(RequestRejected, match="lora.rank is 33; expected an integer from 1 to 32"):
                client.create_lora_run(session_id, model=backend.model, rank=33)
            with lora_run(client, session_id, model=backend.model, rank=2) as run_id:
                sampler_id = client.run_operation(run_id, "save_weights_for_sampler", {})["sampler_id"]
                for refused, words in [
                    (request([260]), "prompt.token_ids\\[0\\] is 260; the token ids of .* are below 260"),
                    (request([1] * 510), "has 510 tokens and max_tokens is 8; .* at most 512 tokens"),
                ]:
                    with pytest.raises(RequestRejected, match=words):
                        client.sampler_operation(run_id, sampler_id, "sample", refused)


# The contract


@pytest.mark.long
@pytest.mark.parametrize("provider", ["modal", "tinker"])
def test_every_sentence_of_the_contract_holds(provider, made, tmp_path):
    backend = made()
    with serve(tmp_path, backend) as service:
        options = ("--contract-model", backend.model, "--contract-provider", provider)
        command = contract_command(service.base_url, service.api_key, *options)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
    assert "sentences of the contract that were asked hold" in done.stdout
