#!/usr/bin/env bash
# Trains on GPU nodes of a Slurm cluster: one process a GPU.
#
#   sbatch --nodes=4 launch/slurm.sh --config=configs/NAME.py --workdir=/shared/run
#
# jax.distributed reads everything else from Slurm (SLURM_JOB_ID, SLURM_STEP_NODELIST,
# SLURM_NTASKS, SLURM_PROCID, SLURM_LOCALID): no address, port or number is given. Two
# minutes before the time limit all processes get SIGTERM, save the same step and exit
# with 143; then this job queues again and resumes. Logs: logs/JOB/process_N.log, and
# slurm-JOB.out of this script, which Slurm opens before a folder could be made.
#
# CHIP=h100 chooses the compiler's flags (launch/flags.sh; h200 by default); CACHE is a
# folder that all nodes see, for compiled programs.
#
# IMAGE=REGISTRY/glm5_jax:gpu (launch/gpu.Dockerfile) runs it in a container where the
# cluster has pyxis; MOUNTS names what the container sees, by default /shared:/shared.
#
#SBATCH --job-name=glm5
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
set -uo pipefail

# What the network of the cluster needs; these are for InfiniBand.
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-^lo,docker}
export NCCL_IB_DISABLE=${NCCL_IB_DISABLE:-0}
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}
# Slurm runs a copy of this file: launch/ is where sbatch was called.
CHIP=${CHIP:-h200}
# shellcheck source=launch/flags.sh
. "${SLURM_SUBMIT_DIR:-.}/launch/flags.sh"
export JAX_PLATFORMS=cuda PYTHONUNBUFFERED=1
unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY # jax.distributed may hang on them

logs=logs/$SLURM_JOB_ID
mkdir -p "$logs"
# A process that dies takes the others along; those that end by themselves have written
# why. A restart appends.
container=()
if [[ ${IMAGE:-} ]]; then
  container=("--container-image=$IMAGE" "--container-mounts=${MOUNTS:-/shared:/shared}"
    --container-workdir=/glm5_jax)
fi
# Since 22.05 srun no longer takes --cpus-per-task from the job.
srun --kill-on-bad-exit=1 --open-mode=append --label "${container[@]}" \
  ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
  --output="$logs/process_%t.log" \
  "${PYTHON:-python}" -m glm5_jax.train "$@"
code=$?
if ((code == 143)); then
  echo "saved and ended by SIGTERM; queues again (restart ${SLURM_RESTART_COUNT:-0} + 1)"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
