"""A private name of torch or Triton that is gone costs speed, not the import."""

import ast
import inspect
import sys

import pytest
import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

import torch_attn
from tests import fresh
from torch_attn import interpreter, private
from torch_attn.calls import Call
from twin_attention.targets import family

NAMES = [
    ("torch._C._dynamo.guards", "TensorGuards"), ("torch._C._dynamo.guards", "_empty_strided_cuda"),
    ("torch._C", "_AutoDispatchBelowAutograd"), ("torch._C", "_ForceDispatchKeyGuard"),
    ("torch._C", "_len_torch_dispatch_stack"), ("torch._C", "_are_functorch_transforms_active"),
    ("torch.utils._python_dispatch", "_get_current_dispatch_mode"),
]  # fmt: skip

TRITON = [("triton", "knobs"), ("triton.backends.nvidia.driver", "make_tensordesc_arg")]

# Only this project misses the name, which is imported anew, after torch and Triton.
PROGRAM = """
import importlib, torch
class Without:
    def __getattr__(self, asked):
        if asked == name:
            raise AttributeError(asked)
        return getattr(found, asked)
found, real = importlib.import_module(place), importlib.import_module
importlib.import_module = lambda x, *a: Without() if x == place else real(x, *a)
import torch_attn, torch_attn.driver
importlib.import_module = real
q, k, v = (torch.randn(1, 8, 2, 16, requires_grad=True) for _ in range(3))
out = torch_attn.flash_attention(q, k, v)
heads = (x.transpose(1, 2) for x in (q, k, v))
want = torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2)
for x, y in zip((out, *torch.autograd.grad(out.sum(), (q, k, v))),
                (want, *torch.autograd.grad(want.sum(), (q, k, v)))):
    assert x.shape == y.shape
    assert torch.allclose(x, y, rtol=1e-4, atol=1e-5)  # `assert_close` imports slowly
merged, _ = torch_attn.merge_states(torch.ones(2, 1, 8, 2, 16), torch.zeros(2, 1, 2, 8))
assert torch.equal(merged, torch.ones(1, 8, 2, 16))
assert f"{place}.{name}" in str(torch_attn.explain(torch_attn.flash_attention, q, k, v))
assert torch_attn.private.CAN_KEEP == place.startswith("triton")
"""


@pytest.mark.parametrize(("place", "name"), [*NAMES, *TRITON])
def test_without_a_private_name_calls_are_slower_and_right(place, name):
    fresh.run(exec, PROGRAM, {"place": place, "name": name})


@pytest.mark.parametrize("name", interpreter.NAMES)
def test_without_a_name_of_the_interpreter_the_family_says_so(name, monkeypatch):
    gone = "_ir" if name.startswith("_ir.") else name  # its members cannot be taken away
    monkeypatch.delattr(f"triton.runtime.interpreter.{gone}")
    monkeypatch.delitem(sys.modules, interpreter.__name__)
    monkeypatch.setattr(family, "import_error", family.import_error.__wrapped__)  # no cache
    q = torch.randn(1, 8, 2, 16)
    with pytest.raises(NotImplementedError, match=rf"cannot be imported: .*{gone.split('.')[-1]}"):
        torch_attn.flash_attention(q, q, q, implementation="triton")
    assert torch_attn.flash_attention(q, q, q).shape == q.shape


def test_all_names_of_the_interpreter_are_looked_up():
    """Names that are not imported by name, which an import looks up as well."""
    tree = ast.parse(inspect.getsource(interpreter))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "interpreter"
    }
    assert used <= {name.partition(".")[0] for name in interpreter.NAMES}


def test_nothing_is_missing_in_tested_versions():
    assert private.missing() is None


def test_newer_versions_are_named(monkeypatch):
    monkeypatch.setattr(private, "TESTED", {"torch": (1, 0)})
    assert "is newer than 1.0, the newest that was tested" in (private.untested() or "")


def test_dynamo_compiles_nothing_below_an_operator(monkeypatch):
    """A call that raises leaves Dynamo's callback to the frames of the next one."""
    x, callbacks, call = torch.ones(1, 4, 2, 16), [], Call.__call__

    def spy(self, *operands):
        callbacks.append(get_eval_frame_callback())
        return call(self, *operands)

    monkeypatch.setattr(Call, "__call__", spy)
    attend = torch.compile(
        lambda slopes: torch_attn.flash_attention(x, x, x, alibi_slopes=slopes), backend="eager"
    )
    slopes = torch.ones(2, requires_grad=True)
    with pytest.raises(NotImplementedError, match="alibi_slopes"):
        attend(slopes)
    with torch.no_grad():
        attend(slopes)
    assert callbacks == [None]
