"""Training steps of the JAX model; `torch_training` is its twin.

Each phase is a jitted program: the forward returns the arrays of its pullback. A whole step is
another program.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from bench.training.case import PHASES, TrainingCase
from bench.training.timeline import Timeline, add_point, empty_timeline
from models.jax_model import Transformer, next_token_loss

LEARNING_RATE = 3e-4


class JaxTraining:
    """A model with its AdamW optimizer and one batch of random tokens.

    NotImplementedError: the device lacks the attention for this dtype and head dimension.
    """

    def __init__(self, case: TrainingCase, attention: str) -> None:
        dtypes: dict[str, Any] = {name: jnp.dtype(dtype) for name, dtype in case.dtypes.items()}
        model = Transformer(case.config, attention, rngs=nnx.Rngs(0), **dtypes)
        structure, self.params = nnx.split(model)
        shape = (case.batch, case.context + 1)
        self.tokens = jax.random.randint(
            jax.random.key(0), shape, 0, case.config.vocab_size, jnp.int32
        )
        adamw = optax.adamw(LEARNING_RATE)
        self.moments = adamw.init(self.params)
        # TF32 would be no float32.
        self.precision = "highest" if case.dtype == "float32" else None
        self.pullback: Any = None  # the structure of the forward's pullback
        self.sources: list[int | None] = []  # of its leaves: the parameter, or None if saved
        self.saved: Any = None
        self.gradients: Any = None

        def loss(params: Any, tokens: jax.Array) -> jax.Array:
            return next_token_loss(nnx.merge(structure, params), tokens)

        def forward(params: Any, tokens: jax.Array) -> Any:
            value, pullback = jax.vjp(lambda params: loss(params, tokens), params)
            leaves, self.pullback = jax.tree.flatten(pullback)
            # Parameters that the backward reads are no activations, and not copied.
            known = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(params))}
            self.sources = [known.get(id(leaf)) for leaf in leaves]
            return value, [leaf for leaf in leaves if id(leaf) not in known]

        def backward(params: Any, saved: Any) -> Any:
            own, rest = jax.tree.leaves(params), iter(saved)
            leaves = [next(rest) if i is None else own[i] for i in self.sources]
            pullback = jax.tree.unflatten(self.pullback, leaves)
            return pullback(jnp.ones((), jnp.float32))[0]

        def update(params: Any, moments: Any, gradients: Any) -> Any:
            updates, moments = adamw.update(gradients, moments, params)
            return optax.apply_updates(params, updates), moments

        def step(params: Any, moments: Any, tokens: jax.Array) -> Any:
            value, gradients = jax.value_and_grad(loss)(params, tokens)
            return value, *update(params, moments, gradients)

        self.programs = {
            "forward": Program(forward),
            "backward": Program(backward),
            "optimizer": Program(update, (0, 1)),
            "step": Program(step, (0, 1)),
        }

    def forward(self) -> Any:
        loss, self.saved = self.programs["forward"](self.params, self.tokens)
        return loss, self.saved

    def backward(self) -> Any:
        self.gradients = self.programs["backward"](self.params, self.saved)
        self.saved = None
        return self.gradients

    def optimizer(self) -> Any:
        state = self.params, self.moments, self.gradients
        self.params, self.moments = self.programs["optimizer"](*state)
        self.gradients = None
        return self.params

    def step(self) -> Any:
        loss, *state = self.programs["step"](self.params, self.moments, self.tokens)
        self.params, self.moments = state
        return loss, self.params

    def time_step(self) -> dict[str, float]:
        found = {}
        with jax.default_matmul_precision(self.precision) if self.precision else nullcontext():
            for name in (*PHASES, "step"):
                start = time.perf_counter()
                jax.block_until_ready(getattr(self, name)())
                found[name] = (time.perf_counter() - start) * 1e3
        return found

    def memory(self) -> tuple[int, dict[str, int]]:
        """Return what a forward leaves, and each program's peak; call this after `time_step`."""
        resident = num_bytes(self.params) + num_bytes(self.moments) + num_bytes(self.tokens)
        saved = num_bytes(self.forward())
        gradients = num_bytes(self.backward())
        self.optimizer()
        beside = {"forward": 0, "backward": saved, "optimizer": gradients, "step": 0}
        peaks = {
            name: resident + beside[name] + program.temporaries + program.results
            for name, program in self.programs.items()
        }
        return saved, peaks

    def timeline(self) -> Timeline:
        """Return the memory of a step's phases; call this after `time_step`, which compiles."""
        there = {"parameters": num_bytes(self.params), "optimizer state": num_bytes(self.moments)}
        saved = {"saved activations": num_bytes(self.forward())}
        made = {"gradients": num_bytes(self.backward())}
        self.optimizer()
        within = {"forward": saved, "backward": saved | made, "optimizer": made}
        after = {"forward": saved, "backward": made, "optimizer": {}}
        found = empty_timeline()
        add_point(found, "forward", there)
        for phase in PHASES:
            program = self.programs[phase]
            other = program.temporaries + (program.results if phase == "optimizer" else 0)
            add_point(found, phase, there | within[phase] | {"other": other})
            add_point(found, phase, there | after[phase])
        return found


class Program:
    """A jitted function for arguments of one shape, compiled at its first call.

    Its results may take the memory of the `donated` arguments.
    """

    def __init__(self, function: Callable[..., Any], donated: tuple[int, ...] = ()) -> None:
        self.jitted = jax.jit(function, donate_argnums=donated)
        self.compiled: Any = None

    def __call__(self, *arguments: Any) -> Any:
        if self.compiled is None:
            self.compiled = self.jitted.lower(*arguments).compile()
        return self.compiled(*arguments)

    @property
    def temporaries(self) -> int:
        return self.compiled.memory_analysis().temp_size_in_bytes

    @property
    def results(self) -> int:
        plan = self.compiled.memory_analysis()
        return plan.output_size_in_bytes - plan.alias_size_in_bytes


def num_bytes(arrays: Any) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(arrays))
