"""Which code a call runs: decided while tracing, and again when lowered."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_attn import explain, flash_attention
from pallas_attn.dispatch import Backends, choose_backends
from pallas_attn.lowering import recording
from pallas_attn.targets import compiled_for, described
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.config import use_configs
from twin_attention.targets.family import FAMILIES, Backend, Family
from twin_attention.targets.target import use_target

SPEC = AttentionSpec(1, 40, 40, 2, 2, 32, 32, "float32", 0.2)
IN_16_BITS = replace(SPEC, dtype="bfloat16")
MOSAIC, MOSAIC_SM90, _, KERNELS, REFERENCE = FAMILIES["pallas_attn"]
NO_MOSAIC = MOSAIC.supports("flash_fwd", IN_16_BITS, "sm80")  # why not, with an older JAX
ON_GPU = jax.default_backend() == "gpu"
CPU = jax.devices("cpu")[0]


@pytest.fixture
def qkv():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 40, 2, 32))
    return q, k, v


@pytest.fixture
def fresh_caches():
    jax.clear_caches()
    yield
    jax.clear_caches()


def operations(function, qkv, platform):
    lowered = jax.jit(function).trace(*qkv).lower(lowering_platforms=(platform,))
    return set(re.findall(r"stablehlo\.(\w+)", lowered.as_text()))


@pytest.mark.parametrize("implementation", [None, "triton"])
def test_lowered_for_cuda_only_the_kernels_are_left(qkv, implementation, fresh_caches):
    def gradients(q, k, v):
        out, pullback = jax.vjp(partial(flash_attention, implementation=implementation), q, k, v)
        return pullback(out)

    with recording() as kernels:
        found = operations(gradients, qkv, "cuda")
    assert [name for name, *_ in kernels] == [
        "flash_fwd", "flash_bwd_preprocess", "flash_bwd_dq", "flash_bwd_dkdv",
    ]  # fmt: skip
    # The case is over a constant: what JAX leaves of the choice of platform.
    assert found == {"custom_call", "case", "constant", "optimization_barrier", "return"}


@pytest.mark.parametrize("target", ["sm80", "sm90"])
@pytest.mark.parametrize("implementation", [None, "mosaic"])
def test_lowered_for_cuda_the_explicit_kernels_are_left(qkv, implementation, target, fresh_caches):
    """In 16 bits, and where this JAX has them; otherwise the portable ones."""
    qkv = [x.astype(jnp.bfloat16) for x in qkv]
    attention = partial(flash_attention, implementation=implementation)

    def lower():
        traced = jax.jit(attention).trace(*qkv)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    with use_target(target), recording() as kernels:
        if NO_MOSAIC and implementation:
            with pytest.raises(NotImplementedError, match=r"its kernels need jax 0\.11"):
                lower()
            return
        text = lower()
    calls = re.findall(r"custom_call @(\w+)", text)
    if NO_MOSAIC:
        assert [name for name, *_ in kernels] == ["flash_fwd"]
    else:
        assert (kernels, calls) == ([], ["mosaic_gpu_v2"])
    assert set(re.findall(r"stablehlo\.(\w+)", text)) <= {
        "custom_call", "case", "constant", "optimization_barrier", "return",
    }  # fmt: skip


def test_lowered_for_the_cpu_the_interpreter_runs_only_when_asked_for(qkv):
    # The interpreter is a loop over the grid; the reference has none.
    assert "while" in operations(partial(flash_attention, implementation="triton"), qkv, "cpu")
    assert "while" not in operations(flash_attention, qkv, "cpu")
    assert "while" not in operations(
        partial(flash_attention, implementation="reference"), qkv, "cpu"
    )


def test_operands_on_the_cpu_run_there_whatever_the_default_device(qkv):
    qkv = [jax.device_put(x, CPU) for x in qkv]
    want = flash_attention(*qkv, implementation="reference")
    for function in (flash_attention, jax.jit(flash_attention)):
        out = function(*qkv)
        assert out.devices() == {CPU}
        assert jnp.array_equal(out, want)


def test_a_change_of_target_traces_anew(qkv, monkeypatch, fresh_caches):
    traced = []

    def flash_fwd(operands, spec, backend):
        traced.append(backend.target)
        return operands.q, jnp.zeros((spec.batch, spec.heads_q, spec.seq_q), jnp.float32)

    function = Family.function
    monkeypatch.setattr(
        Family,
        "function",
        lambda self, name: function(self, name) if self.folder is None else flash_fwd,
    )
    monkeypatch.setattr("pallas_attn.targets.cuda_devices", lambda: ())
    for target in ("sm80", "sm90", "sm80"):
        with use_target(target):
            flash_attention(*qkv)
    assert traced == ["sm80", "sm90"]


class Gpu:
    def __init__(self, compute_capability):
        self.compute_capability = compute_capability


def test_the_target_is_the_devices_own_or_the_one_asked_for(monkeypatch):
    hopper, ampere, ada, turing = map(Gpu, ("9.0", "8.0", "8.9", "7.5"))
    devices = (hopper, ampere, ada, turing)
    monkeypatch.setattr("pallas_attn.targets.cuda_devices", lambda: devices)
    monkeypatch.setattr("twin_attention.targets.target._environment", None)
    elsewhere = Backend(REFERENCE)
    interpreted = Backend(KERNELS, interpreted=True)
    sm80, sm90 = Backend(KERNELS, "sm80"), Backend(KERNELS, "sm90")
    assert choose_backends(None, "flash_fwd", None, SPEC) == Backends(sm90, elsewhere)
    assert choose_backends(None, "flash_fwd", CPU, SPEC) == Backends(sm90, elsewhere)
    assert choose_backends(None, "flash_fwd", ampere, SPEC) == Backends(sm80, elsewhere)
    assert choose_backends("triton", "flash_fwd", ada, SPEC) == Backends(sm80, interpreted)
    assert choose_backends("reference", "flash_fwd", turing, SPEC) == Backends(elsewhere, elsewhere)
    with use_target("sm80"):
        assert choose_backends("triton", "flash_fwd", hopper, SPEC) == Backends(sm80, interpreted)
    with pytest.raises(NotImplementedError, match=r"^device: expected compute capability"):
        choose_backends(None, "flash_fwd", turing, SPEC)


def test_kernels_are_compiled_before_xla_chooses_where_one_device_stands_for_all(monkeypatch):
    hopper, another, ampere = map(Gpu, ("9.0", "9.0", "8.0"))
    for devices, processes, expected in (
        ((hopper, another), 1, hopper),
        ((hopper, ampere), 1, None),
        ((hopper, another), 2, None),
        ((), 1, None),
    ):
        monkeypatch.setattr("pallas_attn.targets.cuda_devices", lambda devices=devices: devices)
        monkeypatch.setattr(jax, "process_count", lambda backend, count=processes: count)
        assert compiled_for() is expected
        with described(hopper):
            assert compiled_for() is None


@pytest.mark.skipif(NO_MOSAIC is not None, reason=str(NO_MOSAIC))
def test_explicit_kernels_run_on_cuda_devices_alone(qkv, monkeypatch):
    hopper, ampere = map(Gpu, ("9.0", "8.0"))
    sm80, sm90 = Backend(MOSAIC, "sm80"), Backend(MOSAIC_SM90, "sm90")
    with monkeypatch.context() as patch:
        patch.setattr("pallas_attn.targets.cuda_devices", lambda: (ampere, hopper))
        patch.setattr("pallas_attn.dispatch.cuda_devices", lambda: (ampere, hopper))
        patch.setattr("twin_attention.targets.target._environment", None)
        for device, mosaic in ((ampere, sm80), (hopper, sm90)):
            found = choose_backends(None, "flash_fwd", device, IN_16_BITS)
            assert found == Backends(mosaic, Backend(REFERENCE))
        for device, mosaic in ((ampere, sm80), (hopper, sm90), (None, sm80)):
            found = choose_backends("mosaic", "flash_fwd", device, IN_16_BITS)
            assert found == Backends(mosaic, mosaic)
        with pytest.raises(
            NotImplementedError,
            match=r"SM80; its backward takes at least 16 keys; its kernels of paged caches",
        ):
            choose_backends("mosaic", "flash_bwd", hopper, replace(IN_16_BITS, seq_kv=15))
    on_cpu = [jax.device_put(x.astype(jnp.bfloat16), CPU) for x in qkv]
    with use_target("sm80"):
        with pytest.raises(NotImplementedError, match=r"and it has no interpreter$"):
            flash_attention(*on_cpu, implementation="mosaic")
        with pytest.raises(ValueError, match="on CPU backend"):  # where the device is not known yet
            jax.jit(partial(flash_attention, implementation="mosaic"))(*on_cpu)


def test_a_family_without_an_interpreter_says_so_on_a_cpu(qkv):
    on_cpu = [jax.device_put(x, CPU) for x in qkv]  # float32, which Mosaic does not take either
    reason = "its kernels compile for CUDA devices only, and it has no interpreter"
    with pytest.raises(NotImplementedError, match=f"got 'mosaic': {reason}$"):
        flash_attention(*on_cpu, implementation="mosaic")


def test_explain_the_best_choice(qkv):
    explanation = explain(flash_attention, *qkv)
    if ON_GPU:
        assert (explanation.implementation, explanation.execution) == ("triton", "compiled")
        assert explanation.target in ("sm80", "sm90")
        assert "flash_fwd" in explanation.configs
    else:
        assert (explanation.implementation, explanation.execution) == ("reference", "framework")
        assert (explanation.target, explanation.configs) == (None, {})
        reason = "its kernels compile for CUDA devices only"
        assert explanation.passed_over == (f"mosaic: {reason}", f"triton: {reason}")
    assert explanation.device == jax.devices()[0].device_kind


def test_explain_while_tracing_says_what_it_assumes(qkv):
    explanations = []
    jax.eval_shape(lambda *qkv: explanations.append(explain(flash_attention, *qkv)), *qkv)
    (explanation,) = explanations
    assert explanation.device.startswith(jax.devices()[0].device_kind)
    assert "not known while tracing" in explanation.device


def test_changed_configurations_are_traced_anew(qkv, fresh_caches):
    attention = partial(flash_attention, implementation="triton")

    def jaxpr():
        return str(jax.make_jaxpr(lambda *qkv: attention(*qkv))(*qkv))

    shipped = jaxpr()
    with use_configs({"flash_fwd": {"block_q": 16}}):
        changed = jaxpr()
    assert changed != shipped
    assert jaxpr() == shipped


def test_a_backward_keeps_the_configurations_of_its_forward(qkv, fresh_caches):
    attention = partial(flash_attention, implementation="triton")

    def backward(changes):
        def gradients(q, k, v):
            with use_configs(changes):
                out, pullback = jax.vjp(attention, q, k, v)
            return pullback(out)

        return str(jax.make_jaxpr(gradients)(*qkv))

    changed = backward({"flash_bwd_dq": {"block_q": 16}})
    shipped = backward({})
    assert changed != shipped
    assert backward({"flash_bwd_dkdv": {}}) == shipped
