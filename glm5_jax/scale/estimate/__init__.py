"""A training step's memory, work and traffic on a mesh, from shapes alone."""
