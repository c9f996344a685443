"""How fast the client and the embedded engine are: one table, each row a ratio to something in the same run.

    python tests/benchmarks            a minute or two
    python tests/benchmarks --small    some seconds; exit code 1 if a ratio is far off

Times are CPU times of one process, so that other work on the machine hardly matters.
"""

import argparse
import http.client
import importlib.util
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from delay_proxy import DelayProxy

from whitney_loop import WhitneyClient, adamw_optimizer, check_payload, forward_backward_payload, rl_datum
from whitney_loop.local.byte_lm import ByteLM

ROOT = Path(__file__).resolve().parents[2]
DELAY_S = 0.025  # each direction
KEY = "key-of-the-benchmark"
RANK = 32  # the loops' default
OPTIMIZER = {"optimizer": adamw_optimizer(0.1)}


class Table:
    """Prints rows as they are measured. A ratio above ``most``, about twice the usual one, is far off."""

    def __init__(self):
        self.far_off = False

    def row(self, name, ratio, of, most):
        self.far_off = self.far_off or ratio > most
        verdict = f"  FAR OFF: expected at most {most:g}" if ratio > most else ""
        print(f"{name:60} {ratio:7.2f}  {of}{verdict}", flush=True)


def cpu_s(work, runs=5):
    """CPU seconds of the fastest of several runs."""

    def once():
        begin = time.process_time()
        work()
        return time.process_time() - begin

    return min(once() for _ in range(runs))


@contextmanager
def service():
    """An embedded service in another process, so that its CPU time is not the client's."""
    command = [sys.executable, "-u", "-m", "whitney_loop.local", "--port", "0", "--storage"]
    environment = os.environ | {"WHITNEY_API_KEY": KEY}
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen([*command, folder], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE) as process,
    ):
        try:
            yield next(line for line in process.stdout if "WHITNEY_BASE_URL=" in line).strip().partition("=")[2]
        finally:
            process.terminate()


@contextmanager
def training(base_url):
    with WhitneyClient(base_url, KEY) as client:
        session = client.create_session("modal")
        yield client, client.create_lora_run(session, model="byte-lm", rank=1, seed=1)
        client.close_session(session)


def sample_request(num_samples=2, max_tokens=4):
    return {"prompt": {"token_ids": [97]}, "num_samples": num_samples, "sampling_params": {"max_tokens": max_tokens}}


def datums_of(samples):
    sequences = [sequence for sample in samples for sequence in sample]
    return [rl_datum([97], one["tokens"], one["logprobs"], i % 2 - 0.5) for i, one in enumerate(sequences)]


def cycle(client, run, prompts):
    """One cycle of the reference loop."""
    sampler = client.run_operation(run, "save_weights_for_sampler", {})["sampler_id"]
    samples = client.sampler_operations(run, sampler, "sample", [sample_request()] * prompts)
    payload = forward_backward_payload(datums_of(sample["sequences"] for sample in samples), "importance_sampling")
    client.run_operations(run, "forward_backward", [payload])
    client.run_operation(run, "optim_step", OPTIMIZER)


def sampled(completions, completion_tokens, prompt_tokens):
    """A prompt, and the tokens and logprobs of each completion."""
    rng = random.Random(1)
    prompt = [rng.randrange(150_000) for _ in range(prompt_tokens)]
    texts = [[rng.randrange(150_000) for _ in range(completion_tokens)] for _ in range(completions)]
    return prompt, [(text, [-rng.expovariate(1) for _ in text]) for text in texts]


def payload_work(*sizes):
    """The functions that build, check and encode one payload, by name."""
    prompt, completions = sampled(*sizes)

    def build():
        data = [rl_datum(prompt, text, logprobs, 0.5) for text, logprobs in completions]
        return forward_backward_payload(data, "importance_sampling")

    payload = build()
    return {"build": build, "check": lambda: check_payload(payload, "modal"), "encode": lambda: json.dumps(payload)}


def bench_imports(table):
    def user_s(code):
        """CPU seconds of five processes that find the modules compiled, as those of an installed package are."""
        with tempfile.TemporaryDirectory() as compiled:
            environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": compiled}
            run = partial(subprocess.run, [sys.executable, "-c", code], check=True, cwd=ROOT, env=environment)
            run()
            before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            for _ in range(5):
                run()
            return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before

    base = user_s("import urllib.request, json")
    table.row("import whitney_loop", user_s("import whitney_loop") / base, "of import urllib.request, json", 3)
    for peer in ("tinker", "skyrl"):
        if importlib.util.find_spec(peer):
            table.row(f"import {peer}", user_s(f"import {peer}") / base, "the same", float("inf"))
        else:
            print(f"import {peer}: not installed, so not compared")


def cookbook_work(*sizes):
    """The function of tinker-cookbook that builds the same data."""
    import tinker
    from tinker_cookbook.completers import TokensWithLogprobs
    from tinker_cookbook.rl.data_processing import trajectory_to_data
    from tinker_cookbook.rl.types import Trajectory, Transition

    prompt, completions = sampled(*sizes)
    seen = tinker.ModelInput.from_ints(prompt)
    one_turn = [Transition(seen, TokensWithLogprobs(*completion), 0.0, True) for completion in completions]
    trajectories = [Trajectory([transition], seen) for transition in one_turn]
    return lambda: [trajectory_to_data(trajectory, 0.5) for trajectory in trajectories]


def bench_payloads(table, small):
    sizes = (8 if small else 64, 1024, 512)
    seconds = {name: cpu_s(work) for name, work in payload_work(*sizes).items()}
    if importlib.util.find_spec("tinker_cookbook"):
        table.row("build a payload", seconds["build"] / cpu_s(cookbook_work(*sizes)), "of tinker-cookbook", 0.4)
    else:
        print("tinker-cookbook: not installed, so not compared")
    for name in ("build", "check"):
        table.row(f"{name} a payload of 1,024-token completions", seconds[name] / seconds["encode"], "of json.dumps", 1)
    table.row("build, check and encode it", sum(seconds.values()) / seconds["encode"], "of json.dumps", 3)
    lengths = [1024, 4096] if small else [1024, 4096, 32768]
    a_token = [sum(map(cpu_s, payload_work(4, n // 2, n // 2).values())) / n for n in lengths]
    for length, cost in zip(lengths[1:], a_token[1:], strict=True):
        table.row(f"the same, a token, at contexts of {length:,}", cost / a_token[0], "of contexts of 1,024", 2)


def bench_engine(table, small):
    """CPU time a token, as a multiple of that of a fixed loop: 1,000 products summed in plain Python."""
    xs = [i / 1000 for i in range(1000)]
    loop_s = cpu_s(lambda: [sum([x * y for x, y in zip(xs, xs, strict=True)]) for _ in range(100)]) / 100
    engine = ByteLM(RANK, 1)
    sampled_s = trained_s = tokens = 0
    for number in range(6):
        begin = time.process_time()
        samples = [engine.sampler().sample(sample_request(8, 48), f"{number}:{i}") for i in range(4 if small else 16)]
        sampled_s += time.process_time() - begin
        payload = forward_backward_payload(datums_of(samples), "importance_sampling")
        tokens += sum(len(sequence["tokens"]) for sample in samples for sequence in sample)
        begin = time.process_time()
        engine.forward_backward(payload)
        engine.optim_step(OPTIMIZER["optimizer"])
        trained_s += time.process_time() - begin
    print(f"byte-lm, rank {RANK}: {tokens / sampled_s:,.0f} tokens/s sampled, {tokens / trained_s:,.0f} trained")
    table.row("byte-lm samples a token", sampled_s / tokens / loop_s, "of 1,000 products in plain Python", 8)
    table.row("byte-lm trains on a token", trained_s / tokens / loop_s, "of 1,000 products in plain Python", 8)


def bench_exchange(table, base_url):
    with training(base_url) as (client, run):
        bare = http.client.HTTPConnection(base_url.removeprefix("http://"))

        def ask_bare():
            for _ in range(200):
                bare.request("GET", f"/v1/training/runs/{run}", headers={"Authorization": f"Bearer {KEY}"})
                json.loads(bare.getresponse().read())

        ratio = cpu_s(lambda: [client.run(run) for _ in range(200)]) / cpu_s(ask_bare)
        table.row("one small exchange", ratio, "of bare http.client, kept connection", 6)
        bare.close()


def bench_round_trips(table, base_url):
    prompts = 16
    least = 2 + prompts + 1 + 2 + 2  # save; submit the samples, poll the last; forward_backward; optim_step
    with DelayProxy(base_url, DELAY_S) as proxy:
        with training(proxy.base_url) as (client, run):
            cycle(client, run, prompts)
            connections = proxy.connections
            proxy.reset()
            cycle(client, run, prompts)
            trips, exchanges = proxy.round_trips(), len(proxy.exchanges)
            print(f"second cycle of {prompts} prompts: {exchanges} exchanges, {trips} round trips in a row, ", end="")
            print(f"{proxy.bytes_up} bytes up, {proxy.bytes_down} down, {proxy.connections} new connections")
        table.row("its round trips in a row", trips / least, f"of the least possible, {least}", 1.5)
        table.row("connections of the whole session", (connections + proxy.connections) / 10, "of 10", 1)


def bench_growth(table, base_url, small):
    with training(base_url) as (client, run):
        sizes = [1, 4, 16] if small else [1, 4, 16, 64, 256]
        a_prompt = {n: cpu_s(lambda n=n: cycle(client, run, n), 2) / n for n in sizes}
        for n, cost in a_prompt.items():
            table.row(
                f"client's CPU a prompt, cycle of {n}", cost / a_prompt[16], "of a cycle of 16", 10 if n < 16 else 2
            )
        fifth = 100 if small else 2000

        def operations():
            for _ in range(fifth):
                client.run_operation(run, "save_weights_for_sampler", {})

        fifths = [(cpu_s(operations, 1), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) for _ in range(5)]
        table.row(f"the last fifth of {5 * fifth:,} operations", fifths[-1][0] / fifths[0][0], "of the first", 2)
        table.row("peak memory after it", fifths[-1][1] / fifths[0][1], "of after the first", 1.2)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="small sizes; exit code 1 if a ratio is far off")
    small = parser.parse_args().small
    table = Table()
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} processors, {time.strftime('%Y-%m-%d')}")
    bench_imports(table)
    bench_payloads(table, small)
    bench_engine(table, small)
    with service() as base_url:
        bench_exchange(table, base_url)
        bench_round_trips(table, base_url)
        bench_growth(table, base_url, small)
    return 1 if small and table.far_off else 0


if __name__ == "__main__":
    sys.exit(main())
