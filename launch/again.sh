#!/usr/bin/env bash
# Runs a command, passes SIGTERM on, and ends with 1 where the command ended well. A Job of
# Kubernetes is done by a success, and would not start a server again that an eviction has
# let drain.
#
#   exec launch/again.sh python -m glm5_jax.serve ...
set -u
"$@" &
child=$!
trap 'kill -TERM "$child"' TERM INT
wait "$child"
code=$?
while kill -0 "$child" 2> /dev/null; do # the signal had ended the wait
    wait "$child"
    code=$?
done
exit $((code == 0 ? 1 : code))
