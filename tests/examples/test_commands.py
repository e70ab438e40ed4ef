import re
from pathlib import Path

import numpy as np
import pytest

from examples import shared_pool

TOKENS = np.array([[3, 4], [5, 6]])


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_command_says_whether_all_agree(is_wrong, monkeypatch, capsys):
    monkeypatch.setattr(shared_pool, "decode_in_both", lambda device: (TOKENS, TOKENS + is_wrong))
    assert shared_pool.main() == is_wrong
    assert "torch 3 4" in capsys.readouterr().out


def test_every_example_runs_by_itself_and_is_listed():
    folder = Path(__file__).parents[2] / "examples"
    files = {x.name for x in folder.glob("*.py")} - {"__init__.py"}
    listed = re.findall(r"^\| \[`\w+`\]\((\w+\.py)\)", (folder / "README.md").read_text(), re.M)
    assert sorted(listed) == sorted(files)
    assert all((folder / x).read_text().endswith("sys.exit(main())\n") for x in files)
