"""Calls an op within one program, as models do."""

import functools

import jax


def call(op, *args, **options):
    """Returns the op's result; its operations one by one would compile for longer."""
    return jax.jit(functools.partial(op, **options))(*args)
