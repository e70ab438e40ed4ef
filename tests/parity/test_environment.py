import subprocess

import pytest

from twin_attention.interop.parity import environment


@pytest.fixture
def repository(tmp_path, monkeypatch):

    def git(*arguments):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    for name in ("interop/parity/environment.py", "bench/results/records.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text("committed\n")
    git("init")
    git("add", ".")
    git("-c", "user.name=x", "-c", "user.email=x@example.com", "commit", "--message", "all")
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "interop/parity/environment.py"))
    monkeypatch.delenv("TWIN_ATTENTION_COMMIT", raising=False)
    return tmp_path


def test_changed_code_is_said_and_changed_results_are_not(repository):
    (repository / "bench/results/records.jsonl").write_text("another run\n")
    committed = environment._commit()
    assert len(committed) == 12
    (repository / "interop/parity/environment.py").write_text("changed\n")
    assert environment._commit() == f"{committed} with local changes"
