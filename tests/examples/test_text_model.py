import pytest

pytest.importorskip("flax")
pytest.importorskip("optax")

from examples import text_model
from examples.continuous_batching import Request, serve
from examples.support import jax_text, torch_text
from models.config import make_config

pytestmark = pytest.mark.usefixtures("one_thread")


def counting(fed):
    """The next token is one more than the last; keeps what each step was fed."""

    def step(tokens, lengths):
        fed.append(list(zip(tokens.tolist(), lengths.tolist(), strict=True)))
        return tokens + 1

    return step


def test_requests_enter_as_others_leave():
    requests = [Request(bytes([10, 20]), 3), Request(bytes([30]), 1), Request(bytes([40]), 2)]
    fed = []
    assert serve(requests, 2, counting(fed)) == 4
    assert [r.answer for r in requests] == [[21, 22, 23], [31], [41, 42]]
    assert [r.served for r in requests] == [(0, 3), (0, 0), (1, 2)]
    assert fed == [
        [(10, 0), (30, 0)],
        [(20, 1), (40, 0)],
        [(21, 2), (41, 1)],
        [(22, 3), (0, 0)],  # no request is left for the second slot
    ]


@pytest.mark.parametrize("side", [torch_text, jax_text], ids=["torch", "jax"])
def test_training_and_serving(side):
    model = side.make_model(make_config("tiny", num_layers=1))
    text = b"abcdefgh" * 100
    losses = list(side.train(model, text_model.batches(text, 15), 1e-2))
    assert len(losses) == 15
    assert losses[-1] < 0.8 * losses[0]
    # A slot that another request used before changes nothing, nor do other requests.
    together = [Request(b"abc", 5), Request(b"cd", 2), Request(b"fgh", 4)]
    serve(together, 2, side.make_step(model, 2, 8))
    alone = Request(b"fgh", 4)
    serve([alone], 2, side.make_step(model, 2, 8))
    assert together[2].answer == alone.answer


def test_the_command(monkeypatch, capsys):
    monkeypatch.setattr(text_model, "BATCH", 2)
    assert text_model.main(["torch", "--steps", "3"]) == 0
    printed = capsys.readouterr().out
    assert "4 requests in 87 steps, 163 one after the other" in printed
    assert "steps  0 to 20: 'The kernel' -> " in printed
