"""`python -m pallas_kernels.bench` compares each op with the limits of its chip."""
