"""A simulation: which mesh is worth compiling, from sizes alone."""
