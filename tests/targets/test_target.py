import os
import re
import subprocess
import sys
import threading

import pytest

from twin_attention.targets import target
from twin_attention.targets.target import requested_target, resolve_target, use_target

VARIABLE = "TWIN_ATTENTION_TARGET"


@pytest.fixture(autouse=True)
def no_target_asked_for(monkeypatch):
    monkeypatch.setattr(target, "_environment", None)


@pytest.mark.parametrize(("value", "expected"), [("sm80", "sm80"), ("", None)])
def test_the_environment_asks(value, expected):
    program = "from twin_attention.targets import target; print(target.requested_target())"
    environment = os.environ | {VARIABLE: value}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == str(expected)


def test_an_unknown_target_is_refused(monkeypatch):
    message = "target: expected None or one of 'sm80', 'sm90', got 'sm70'"
    with pytest.raises(ValueError, match=f"^{message}$"), use_target("sm70"):
        pass
    assert requested_target() is None
    monkeypatch.setattr(target, "_environment", "ampere")
    message = f"{VARIABLE}: expected None or one of 'sm80', 'sm90', got 'ampere'"
    with pytest.raises(ValueError, match=f"^{message}$"):
        requested_target()


def test_the_context_wins_over_the_environment_and_nests(monkeypatch):
    monkeypatch.setattr(target, "_environment", "sm90")
    with use_target("sm80"):
        assert requested_target() == "sm80"
        with use_target("sm90"):
            assert requested_target() == "sm90"
            with use_target(None):
                assert requested_target() == "sm90"
        assert requested_target() == "sm80"
        with use_target(None):
            assert requested_target() == "sm80"
        assert requested_target() == "sm80"
    assert requested_target() == "sm90"


def test_other_threads_see_the_target():
    seen = []
    with use_target("sm80"):
        thread = threading.Thread(target=lambda: seen.append(requested_target()))
        thread.start()
        thread.join()
    assert seen == ["sm80"]


@pytest.mark.parametrize(
    ("capability", "requested", "target"),
    [
        ((8, 0), None, "sm80"), ((8, 6), None, "sm80"), ((9, 0), None, "sm90"),
        ((10, 0), None, "sm80"), ((9, 0), "sm80", "sm80"), ((9, 0), "sm90", "sm90"),
        ((8, 0), "sm80", "sm80"),
    ],
)  # fmt: skip
def test_resolve_target(capability, requested, target):
    with use_target(requested):
        assert resolve_target(capability) == target


def test_a_device_older_than_ampere_is_refused():
    message = "device: expected compute capability 8.0 or newer, got 7.5"
    with pytest.raises(NotImplementedError, match=f"^{re.escape(message)}$"):
        resolve_target((7, 5))


def test_hopper_code_on_another_device_is_refused():
    message = f"{VARIABLE}: expected sm80 on this sm80 device, got sm90"
    with use_target("sm90"), pytest.raises(NotImplementedError, match=f"^{re.escape(message)}$"):
        resolve_target((8, 0))
