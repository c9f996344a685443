"""The loops can be read: each is one short file that shows its whole cycle."""

import ast
import sys

import pytest

from loop_runs import EXAMPLES

CYCLE = {
    "rl_loop": ['"save_weights_for_sampler"', '"sample"', "build_loss(", '"forward_backward"', '"optim_step"',
                '"save_state"', '"export_lora"'],
    "sft_loop": ['"forward_backward"', '"optim_step"', '"save_state"', '"export_lora"'],
    "distillation_loop": ['"save_weights_for_sampler"', '"sample"', '"logprobs"', '"forward_backward"', '"optim_step"',
                          '"save_state"', '"export_lora"'],
}  # fmt: skip
LONGEST_FILE = {"rl_loop": 200, "sft_loop": 150, "distillation_loop": 150}  # lines
LONGEST_TRAIN = 60  # lines: one screen


def source(name):
    return (EXAMPLES / f"{name}.py").read_text()


@pytest.mark.parametrize("name", CYCLE)
def test_the_cycle_stands_on_one_screen_in_the_documented_order(name):
    [train] = [node for node in ast.parse(source(name)).body if getattr(node, "name", "") == "train"]
    text = ast.get_source_segment(source(name), train)
    places = [text.index(operation) for operation in CYCLE[name]]
    assert places == sorted(places)
    assert text.count("\n") < LONGEST_TRAIN


@pytest.mark.parametrize("name", CYCLE)
def test_a_loop_is_short_and_imports_only_the_package_and_the_standard_library(name):
    assert source(name).count("\n") <= LONGEST_FILE[name]
    imported = [alias.name for node in ast.walk(ast.parse(source(name)))
                if isinstance(node, ast.Import) for alias in node.names]  # fmt: skip
    imported += [node.module for node in ast.walk(ast.parse(source(name))) if isinstance(node, ast.ImportFrom)]
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names | {"whitney_loop"}
