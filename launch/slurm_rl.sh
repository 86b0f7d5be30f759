#!/usr/bin/env bash
# Asynchronous RL on GPU nodes of a Slurm cluster: the last nodes sample, the others
# train, one process a GPU as in slurm.sh.
#
#   SERVER_NODES=2 CHECKPOINT=/shared/sft STORE=/shared/weights \
#     SERVE="--num_slots=64 --capacity=32768 --config.mesh.expert=8" \
#     sbatch --nodes=6 launch/slurm_rl.sh --config=configs/NAME.py --workdir=/shared/run
#
# CHECKPOINT is the model that servers and trainer start from, STORE the folder for the
# weights of each step; all nodes see both. SERVE are more flags of glm5_jax.serve. Each
# of SERVER_NODES (1) runs SERVERS_PER_NODE (1) servers, which share its GPUs. The router
# is on the first node, at PORT (8400); the servers have the ports after it. One that
# ends starts again, and gets the present weights. All end with the trainer.
#
# The key, $GLM5_JAX_API_KEY, is drawn unless it is set; it stands in no command line.
#
# Two minutes before the time limit this script gets SIGTERM, and passes it to the
# trainer alone: it needs the servers until its step is over. It saves and ends with 143;
# then this job queues again and resumes. The same at once: scancel --batch
# --signal=TERM JOB. Logs: logs/JOB/router.log, server_N.log, process_N.log.
#
# CHIP and CACHE: see slurm.sh; so IMAGE=REGISTRY/glm5_jax:gpu and MOUNTS.
#
#SBATCH --job-name=glm5-rl
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=12:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
set -uo pipefail

usage="SERVER_NODES=1 CHECKPOINT=... STORE=... sbatch --nodes=N $0 --config=..."
: "${CHECKPOINT:?name the model that all start from: $usage}"
: "${STORE:?name a folder for the weights of each step: $usage}"
server_nodes=${SERVER_NODES:-1} per_node=${SERVERS_PER_NODE:-1} port=${PORT:-8400}
read -ra serve <<<"${SERVE:-}"
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
train_nodes=$((${#nodes[@]} - server_nodes))
if ((train_nodes < 1 || server_nodes < 1)); then
  echo "SERVER_NODES must be at least 1 and leave a node to the trainer, got" \
    "$server_nodes of ${#nodes[@]} nodes: $usage" >&2
  exit 2
fi

# What the network of the cluster needs; these are for InfiniBand.
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-^lo,docker}
export NCCL_IB_DISABLE=${NCCL_IB_DISABLE:-0}
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}
# Slurm runs a copy of this file: launch/ is where sbatch was called.
CHIP=${CHIP:-h200}
# shellcheck source=launch/flags.sh
. "${SLURM_SUBMIT_DIR:-.}/launch/flags.sh"
export JAX_PLATFORMS=${JAX_PLATFORMS:-cuda} PYTHON=${PYTHON:-python} PYTHONUNBUFFERED=1
unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY # jax.distributed may hang on them
if [[ -z ${GLM5_JAX_API_KEY:-} ]]; then
  GLM5_JAX_API_KEY=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
fi
export GLM5_JAX_API_KEY

logs=logs/$SLURM_JOB_ID
mkdir -p "$logs"
container=()
if [[ ${IMAGE:-} ]]; then
  container=("--container-image=$IMAGE" "--container-mounts=${MOUNTS:-/shared:/shared}"
    --container-workdir=/glm5_jax)
fi
step() { # Starts the tasks of a part of the job: NAME of the log, then as srun.
  exec srun --kill-on-bad-exit=1 --open-mode=append --label "${container[@]}" \
    --output="$logs/$1.log" "${@:2}"
}

# A task of the servers' step. A server is alone, whatever Slurm says of the others, and
# has its share of the GPUs; only wrong input (2) is not tried again.
# shellcheck disable=SC2016  # it expands there
keep='
if [[ ${CUDA_VISIBLE_DEVICES:-} ]]; then
  IFS=, read -ra gpus <<<"$CUDA_VISIBLE_DEVICES"
  each=$((${#gpus[@]} / PER_NODE))
  share=("${gpus[@]:SLURM_LOCALID * each:each}")
  export CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${share[*]}")
fi
trap "kill \$! && wait \$!; exit 0" TERM # also between its start and the next line
while :; do
  JAX_NUM_PROCESSES=1 "$@" --port=$((FIRST_PORT + SLURM_PROCID)) &
  wait "$!"
  code=$?
  ((code == 2)) && exit 2
  echo "the server ended with code $code and starts again" >&2
  sleep 1
done'
number=$((server_nodes * per_node)) replicas=
for ((i = 0; i < number; i++)); do
  node=${nodes[train_nodes + i / per_node]}
  replicas+=${replicas:+,}http://$node:$((port + 1 + i))
done
# shellcheck disable=SC2016  # it expands there
train='launch/await_servers.sh "$1" && exec "$PYTHON" -m glm5_jax.train "${@:2}"'
tasks=${SLURM_NTASKS_PER_NODE:-8} cpus=${SLURM_CPUS_PER_TASK:-1}
router=http://${nodes[0]}:$port

early= # a signal before the trainer's number is known
trap 'early=1' TERM INT
(step router --nodes=1 --ntasks=1 --relative=0 --overlap \
  "$PYTHON" -m glm5_jax.route --host=0.0.0.0 --port="$port" \
  --replicas="$replicas") &
parts=("$!")
(PER_NODE=$per_node FIRST_PORT=$((port + 1)) step server_%t --nodes="$server_nodes" \
  --relative="$train_nodes" --ntasks="$number" --ntasks-per-node="$per_node" \
  --distribution=block --cpus-per-task=$((tasks * cpus / per_node)) \
  bash -c "$keep" serve "$PYTHON" -m glm5_jax.serve --checkpoint="$CHECKPOINT" \
  --weights_root="$STORE" --host=0.0.0.0 "${serve[@]}") &
parts+=("$!")
(step process_%t --nodes="$train_nodes" --relative=0 --ntasks-per-node="$tasks" \
  --ntasks=$((train_nodes * tasks)) --cpus-per-task="$cpus" \
  bash -c "$train" train "$router" --config.init_from="$CHECKPOINT" --config.rl.num_engines=0 \
  --config.rl.servers="$router" --config.rl.weights_store="$STORE" "$@") &
trainer=$!
trap 'kill "$trainer"' TERM INT
[[ $early ]] && kill "$trainer"

ended= # a part that has ended before the trainer
while kill -0 "$trainer" 2>/dev/null; do
  for part in "${parts[@]}"; do
    if [[ -z $ended ]] && ! kill -0 "$part" 2>/dev/null; then
      ended=$part
      echo "the router or the servers have ended: see $logs" >&2
      kill "$trainer"
    fi
  done
  sleep 0.2 & # a signal ends the wait at once
  wait "$!"
done
wait "$trainer"
code=$?
kill "${parts[@]}" 2>/dev/null
if [[ $ended ]]; then
  wait "$ended"
  code=$?
  ((code)) || code=1
elif ((code == 143)); then
  echo "saved and ended by SIGTERM; queues again (restart ${SLURM_RESTART_COUNT:-0} + 1)"
  scontrol requeue "$SLURM_JOB_ID"
fi
wait
exit "$code"
