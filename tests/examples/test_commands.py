"""Each example prints what it found, and exits with 1 if that is wrong."""

import re
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from examples.group_policy import Update

TOKENS = np.array([[3, 4], [5, 6]])
LOSSES = {False: [2.0, 1.0], True: [2.0, 2.0]}


def updates(is_wrong):
    gradients = [{"q": np.ones(2)}, {"q": np.full(2, 1.1 if is_wrong else 1.0)}]
    names = ("torch tree", "jax tree")
    return {x: Update([2.0], [y]) for x, y in zip(names, gradients, strict=True)}


def found(is_wrong, function, *_, **options):
    """Find every fault, or none."""
    if isinstance(function, partial) and not is_wrong:
        raise AssertionError("found")
    return {}


def in_turn(*results):
    left = iter(results)
    return lambda *_: next(left)


# example: (what each of its functions returns for a right or a wrong run, how lines begin)
COMMANDS = {
    "check_a_kernel": (
        lambda is_wrong: {"check_attention": partial(found, is_wrong)},
        ["right: {}"],
    ),
    "draft_tree": (
        lambda is_wrong: {
            "decode": in_turn(*((np.array([[i * is_wrong]]), 5) for i in range(4)))
        },
        ["torch drafts:"],
    ),
    "group_policy": (
        lambda is_wrong: {"update_in_both": lambda device: updates(is_wrong)},
        ["torch tree", "jax tree"],
    ),
    "jax_context_training": (
        lambda is_wrong: {
            "jax.config.update": lambda name, value: None,
            "jax.make_mesh": lambda *args, **kwargs: None,
            "train_on_one_device": lambda: LOSSES[False],
            "train_on_devices": lambda mesh: LOSSES[is_wrong],
        },
        ["one device", "4 devices"],
    ),
    "latent_attention": (
        lambda is_wrong: {"largest_differences": lambda device: (1e-4, 1e-1 if is_wrong else 1e-4)},
        ["torch 1.0e-04"],
    ),
    "packed_training": (
        lambda is_wrong: {
            "train_in_both": lambda device: {"torch x": LOSSES[False], "jax x": LOSSES[is_wrong]}
        },
        ["torch x", "jax x"],
    ),
    "shared_pool": (
        lambda is_wrong: {"decode_in_both": lambda device: (TOKENS, TOKENS + is_wrong)},
        ["torch 3", "torch 5"],
    ),
    "torch_context_training": (
        lambda is_wrong: {
            "train_on_one_device": lambda: LOSSES[False],
            "train_on_ranks": lambda: [LOSSES[is_wrong]],
        },
        ["one device", "rank 0"],
    ),
    "torch_host_keys": (
        lambda is_wrong: {"largest_error": lambda *_, **__: 1e-3 if is_wrong else 1e-6},
        [],
    ),
    "two_frameworks_training": (
        lambda is_wrong: {
            "train_in_both": lambda: (
                {"torch mosaic": LOSSES[False], "jax gluon": LOSSES[is_wrong]}, 1e-3
            )
        },
        ["torch mosaic", "jax gluon"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_whether_all_agree(name, is_wrong, monkeypatch, capsys):
    if name == "two_frameworks_training":
        pytest.importorskip("flax")
    results, beginnings = COMMANDS[name]
    for function, result in results(is_wrong).items():
        monkeypatch.setattr(f"examples.{name}.{function}", result)
    assert import_module(f"examples.{name}").main() == is_wrong
    printed = capsys.readouterr().out
    found = [" ".join(line.split()[:2]) for line in printed.splitlines()]
    assert [x for x in found if x in beginnings] == beginnings


def test_every_example_runs_by_itself_and_is_listed():
    folder = Path(__file__).parents[2] / "examples"
    files = {x.name for x in folder.glob("*.py")} - {"__init__.py"}
    listed = re.findall(r"^\| \[`\w+`\]\((\w+\.py)\)", (folder / "README.md").read_text(), re.M)
    assert sorted(listed) == sorted(files)
    assert all((folder / x).read_text().endswith("sys.exit(main())\n") for x in files)
