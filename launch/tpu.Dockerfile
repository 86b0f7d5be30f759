# An image for Cloud TPU hosts: launch/gke_jobset.yaml, xpk, or docker run on a TPU VM.
#
#   docker build -f launch/tpu.Dockerfile -t REGISTRY/glm5_jax:tpu .
#   docker push REGISTRY/glm5_jax:tpu
FROM python:3.12-slim

WORKDIR /glm5_jax
# What is installed changes less often than the code: a layer of its own.
COPY setup.py MANIFEST.in README.md LICENSE ./
COPY pallas_kernels ./pallas_kernels
COPY glm5_jax/__init__.py ./glm5_jax/
RUN pip install --no-cache-dir -e ".[tpu,serve]"
COPY . .

ENV JAX_PLATFORMS=tpu PYTHONUNBUFFERED=1
# exec form: SIGTERM reaches python, which saves before it ends.
ENTRYPOINT ["python", "-m", "glm5_jax"]
