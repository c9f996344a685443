"""A function that is copied out of a file, with the helpers of its module, works alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "whitney_loop"

CALLS = {
    "datums": [
        ("tensor", "tensor('int64', [1, 2])['shape'] == [2]"),
        ("sft_datum", "sft_datum([1], [2, 3])['loss_inputs']['weights']['values'] == [1.0, 1.0]"),
        ("trajectory_datum", "len(trajectory_datum([([1], None), ([2], [-1])], 1)['loss_inputs']) == 4"),
        ("critic_datum", "critic_datum([1], [2], [0.5], [1])['loss_inputs']['returns']['values'] == [1.0]"),
        ("completion_logprobs", "completion_logprobs({'logprobs': [None, -1.0]}, [5]) == [-1.0]"),
        ("completion_values", "completion_values({'values': [0.5, 0.25]}, [5]) == [0.5, 0.25]"),
        ("rl_datum", "rl_datum([1, 2], [3], [-0.5], 2)['loss_inputs']['advantages']['values'] == [0.0, 2.0]"),
    ],
    "advantages": [
        ("group_mean_advantages", "group_mean_advantages([0, 1], normalize_std=True) == [-1.0, 1.0]"),
        ("all_zero", "all_zero([0, 0.0])"),
        ("leave_one_out_baseline", "leave_one_out_baseline([0, 2]) == [-2.0, 2.0]"),
        ("soft_advantages", "soft_advantages([2, 2], beta=0.1) == [0.0, 0.0]"),
        ("generalized_advantages", "generalized_advantages([1], [0], gamma=1, gae_lambda=1) == ([1.0], [1.0])"),
        ("kl_shaped_returns", "kl_shaped_returns(1, [-1], [-2], kl_coef=0.5) == [0.5]"),
        ("batch_normalize", "batch_normalize([[0], [2]]) == [[-1.0], [1.0]]"),
        ("length_normalize", "length_normalize(3, 2) == 1.5"),
        ("kl_adjust_advantages", "kl_adjust_advantages([1], [-1], [-2], kl_coef=0.5) == [0.5]"),
    ],
    "losses": [
        ("require_advertised_loss", "require_advertised_loss('modal', 'ppo') is None"),
        ("require_loss_config", "require_loss_config('modal', 'dppo', {'delta_low': 0.2}) is None"),
    ],
    "payloads": [
        ("forward_backward_payload", "forward_backward_payload([{}], 'ppo')['loss_config'] == {}"),
        ("adamw_optimizer", "adamw_optimizer(1e-3)['beta2'] == 0.95"),
        ("sample_request", "sample_request([1], num_samples=2, max_tokens=3)['num_samples'] == 2"),
        ("logprobs_request", "logprobs_request([1, 2]) == {'input': {'token_ids': [1, 2]}}"),
    ],
}


def without_package_imports(source: str) -> str:
    """Return the module's source without its imports from this package."""
    tree = ast.parse(source)
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("whitney_loop"))
    ]
    return ast.unparse(tree)


def keep_what_is_reachable(source: str, name: str) -> str:
    """Return the source of the function and of everything in its module that it needs, directly or not."""
    tree = ast.parse(source)
    defined: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            assert isinstance(target, ast.Name)
            defined[target.id] = node
    wanted, queue = set(), [name]
    while queue:
        found = queue.pop()
        if found in defined and found not in wanted:
            wanted.add(found)
            queue += [node.id for node in ast.walk(defined[found]) if isinstance(node, ast.Name)]
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, (ast.Import, ast.ImportFrom)) or node in [defined[name] for name in wanted]
    ]
    return ast.unparse(tree)


@pytest.mark.parametrize("module", CALLS)
def test_a_public_function_pasted_elsewhere_with_its_helpers_works_alone(module, tmp_path):
    source = without_package_imports((PACKAGE / f"{module}.py").read_text())
    script = []
    for name, call in CALLS[module]:
        pasted = keep_what_is_reachable(source, name)
        script.append(f"namespace = {{}}\nexec({pasted!r}, namespace)\nassert eval({call!r}, namespace), {call!r}")
    path = tmp_path / "pasted.py"
    path.write_text("\n".join(script))
    # -I: neither the working folder nor installed packages are importable, the standard library is.
    subprocess.run([sys.executable, "-I", "-S", str(path)], check=True, cwd=tmp_path)


def test_every_public_function_of_the_copyable_modules_is_among_those_tested():
    for module, calls in CALLS.items():
        tree = ast.parse((PACKAGE / f"{module}.py").read_text())
        public = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"}
        assert {name for name in public if not name.startswith("check_")} == {name for name, _ in calls}
