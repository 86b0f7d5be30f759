#!/usr/bin/env bash
# Trains on all hosts of a Cloud TPU slice, or of several slices of a queued resource.
#
#   TPU=my-pod ZONE=us-east5-a launch/tpu_pod.sh \
#     --config=configs/NAME.py --workdir=/mnt/shared/run
#
# Every host has the code in FOLDER: SETUP=1 copies and installs it, the first time and
# after a change; what else is in FOLDER stays. --workdir is on a file system that all of
# them mount, such as Filestore. jax.distributed asks the metadata server for the hosts:
# no address is given. Logs: logs/TPU/WORKER.log, of all hosts. Where the run saved and
# ended by SIGTERM (143), before maintenance say, it starts again.
#
# CHIP=v6e chooses the compiler's flags (launch/flags.sh; v5p by default); CACHE is a
# folder that all hosts see, for compiled programs.
#
# Several slices: TPU="slice-0 slice-1" starts all of them at once. Slices that one
# queued resource made know of each other (MEGASCALE_* in their metadata).
set -uo pipefail

: "${TPU:?name the TPU: TPU=my-pod ZONE=... $0 --config=...}" "${ZONE:?}"
read -ra slices <<<"$TPU"
folder=${FOLDER:-glm5_jax}
arguments=$(printf ' %q' "$@")
trap 'kill $(jobs -p) 2>/dev/null; exit 130' INT

everywhere() {  # Runs a command on all hosts of all slices; output: one file a host.
  local slice pids=()
  for slice in "${slices[@]}"; do
    mkdir -p "logs/$slice"
    gcloud compute tpus tpu-vm ssh "$slice" --zone="$ZONE" --worker=all \
      --output-directory="logs/$slice" --command="$1" &
    pids+=("$!")
  done
  wait "${pids[@]}"
}

# Run by the hosts: sets python to one that glm5_jax runs on, and installs it if need be.
# shellcheck disable=SC2016  # it expands there
find_python='
for python in python3.13 python3.12 python3.11 python3 none; do
  "$python" -c "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))" \
    2>/dev/null && break
done
if [ "$python" = none ]; then
  python=python3.11
  sudo apt-get update && sudo apt-get install -y python3.11 python3.11-venv
fi &&'
if [[ ${SETUP:-} ]]; then
  everywhere "rm -rf $folder.new" || exit  # scp would copy into a folder that is there
  for slice in "${slices[@]}"; do
    gcloud compute tpus tpu-vm scp --recurse --worker=all --zone="$ZONE" \
      "$PWD" "$slice:$folder.new" || exit
  done
  # The packages are replaced, and the environment there is kept, if there is one.
  everywhere "rm -rf $folder.new/.venv &&
    rm -rf $folder/glm5_jax $folder/pallas_kernels $folder/.git && mkdir -p $folder &&
    cp -Rf $folder.new/. $folder && rm -rf $folder.new" || exit
  # python3 is 3.10 on tpu-ubuntu2204-base; Ubuntu has 3.11 beside it.
  everywhere "cd $folder && $find_python
    \"\$python\" -m venv .venv && .venv/bin/pip install -e '.[tpu]'" || exit
fi

# gcloud does not pass every exit code on, so each host writes its own.
export_all="PYTHONUNBUFFERED=1 JAX_PLATFORMS=tpu ${EXPORT:-}"
flags="CHIP=${CHIP:-v5p} CACHE=${CACHE:-} && . launch/flags.sh"
train="cd $folder && $flags && env $export_all .venv/bin/python -m glm5_jax.train$arguments"
for ((restart = 0; restart <= ${MAX_RESTARTS:-100}; restart++)); do
  everywhere "$train; code=\$?; echo \"glm5_jax exit code \$code\"; exit \$code"
  codes=$(for slice in "${slices[@]}"; do
    sed -n 's/^glm5_jax exit code \([0-9]*\)$/\1/p' "logs/$slice"/*.log
  done | sort -un | tr '\n' ' ')
  echo "exit codes: ${codes:-none}" >&2
  case $codes in
    "0 ") exit 0 ;;
    "143 ") sleep "${PAUSE:-30}" ;; # saved; the hosts may be back soon
    *) exit 1 ;;                    # read logs/TPU/WORKER.log
  esac
done
exit 143
