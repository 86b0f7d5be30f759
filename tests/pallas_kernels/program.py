"""Calls an op within one program, as models do, and lists the kernels of programs."""

import functools

import jax


def call(op, *args, **options):
    """Returns the op's result; its operations one by one would compile for longer."""
    return jax.jit(functools.partial(op, **options))(*args)


def kernels(jaxpr):
    """Returns the parameters of each call of a kernel in a jaxpr."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            found.append(equation.params)
            continue
        for inner in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found += kernels(inner)
    return found


def traced(function, *args):
    """Returns a function's result, which may be no array, for arrays of these shapes.

    Args:
      function: of arrays.
      *args: a shape and a dtype each.
    """
    found, specs = [], (jax.ShapeDtypeStruct(*arg) for arg in args)
    jax.eval_shape(lambda *arrays: found.append(function(*arrays)), *specs)
    return found[0]
