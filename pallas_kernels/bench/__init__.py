"""`python -m pallas_kernels.bench`: how far each op is from what its chip could do."""
