"""GLM-5 in JAX: the model, its kernels, its optimizer, its training stages."""

__version__ = "0.1.0"
