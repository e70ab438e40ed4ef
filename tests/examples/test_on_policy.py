import pytest

from examples import on_policy


@pytest.mark.parametrize("name", on_policy.FRAMEWORKS)
def test_a_model_trains_at_the_probabilities_of_sampling(name, monkeypatch):
    """One round of few tokens, since an interpreter takes its time."""
    monkeypatch.setattr(on_policy, "PROMPTS", ((b"\3\1", 2), (b"\7", 3)))
    assert on_policy.differences(on_policy.FRAMEWORKS[name], rounds=1) == [0.0]
