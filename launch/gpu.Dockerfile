# An image for hosts with NVIDIA GPUs; CUDA 13 comes with the Python packages, and the
# host brings the driver (580 or newer) and the container toolkit.
#
#   docker build -f launch/gpu.Dockerfile -t REGISTRY/glm5_jax:gpu .
#   docker run --gpus=all --shm-size=8g REGISTRY/glm5_jax:gpu train --config=quickstart
FROM python:3.12-slim

# Triton compiles its launchers with a C compiler.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /glm5_jax
# What is installed changes less often than the code: a layer of its own.
COPY setup.py MANIFEST.in README.md LICENSE ./
COPY pallas_kernels ./pallas_kernels
COPY glm5_jax/__init__.py ./glm5_jax/
RUN pip install --no-cache-dir -e ".[gpu,serve]"
COPY . .

ENV JAX_PLATFORMS=cuda PYTHONUNBUFFERED=1
# exec form: SIGTERM reaches python, which saves before it ends.
ENTRYPOINT ["python", "-m", "glm5_jax"]
