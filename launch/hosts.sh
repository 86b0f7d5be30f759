#!/usr/bin/env bash
# Trains on plain hosts over ssh: one process a host, each with all of its devices.
#
#   HOSTS="host0 host1" launch/hosts.sh --config=configs/NAME.py --workdir=/shared/run
#
# Every host has this folder at the same path, and a file system that all share holds
# --workdir. Process 0 runs on the first host, which the others reach at PORT. Output:
# LOGS/process_N.log, that of process 0 here as well. Where SIGTERM made the run save and
# end (143), it starts again, at most MAX_RESTARTS times. Ctrl-C ends all.
#
# To end it with a checkpoint: MAX_RESTARTS=0, and SIGTERM to one process on any host.
#
# Variables: HOSTS; PORT (8476); LOGS (logs); PYTHON (python); SSH (ssh);
# MAX_RESTARTS (100); PAUSE (5 s); CHIP and CACHE (see launch/flags.sh); EXPORT, e.g. EXPORT="NCCL_SOCKET_IFNAME=eth0 JAX_PLATFORMS=cuda".
set -uo pipefail

: "${HOSTS:?name the hosts: HOSTS=\"host0 host1\" $0 --config=...}"
read -ra hosts <<<"$HOSTS"
read -ra ssh <<<"${SSH:-ssh -o BatchMode=yes -o ServerAliveInterval=15 -tt}"
port=${PORT:-8476} logs=${LOGS:-logs} python=${PYTHON:-python}
mkdir -p "$logs"

here=$(printf %q "$PWD")
arguments=$(printf ' %q' "$@")

run() {  # All processes once; returns the first exit code that is not 0.
  local pids=() number code first=0 show late=
  for number in "${!hosts[@]}"; do
    # A remote shell that loses its connection must not leave its process behind: -tt.
    "${ssh[@]}" "${hosts[number]}" "cd $here && CHIP=${CHIP:-} CACHE=${CACHE:-} && \
      . launch/flags.sh && exec env ${EXPORT:-} \
      JAX_COORDINATOR_ADDRESS=${hosts[0]}:$port JAX_NUM_PROCESSES=${#hosts[@]} \
      JAX_PROCESS_ID=$number PYTHONUNBUFFERED=1 $python -m glm5_jax.train$arguments" \
      >"$logs/process_$number.log" 2>&1 </dev/null &
    pids+=("$!")
  done
  trap 'kill "${pids[@]}" "$show" 2>/dev/null; exit 130' INT TERM
  tail -n +1 -f "$logs/process_0.log" &
  show=$!
  for number in "${!pids[@]}"; do
    wait "${pids[number]}"
    code=$?
    if ((code && !first)); then
      first=$code
      echo "process $number on ${hosts[number]} ended with code $code" >&2
      # The others end by themselves within seconds; these are for a host that is gone.
      (sleep 60 && kill "${pids[@]}") >/dev/null 2>&1 &
      late=$!
    fi
  done
  sleep 1
  kill "$show" ${late:+"$late"}
  return "$first"
}

for ((restart = 0; restart <= ${MAX_RESTARTS:-100}; restart++)); do
  run "$@"
  code=$?
  ((code == 143)) || exit "$code"
  echo "saved and ended by SIGTERM; restart $((restart + 1))" >&2
  sleep "${PAUSE:-5}"
done
exit 143
