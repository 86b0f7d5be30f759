#!/usr/bin/env bash
# Runs a command, passes SIGTERM on, and ends with 1 where the command ended well. A Job of
# Kubernetes is done by a success, and would not start a server again that an eviction has
# let drain.
#
#   exec launch/again.sh python -m glm5_jax.serve ...
set -u
# Before the command: a signal in between would end this script and leave it running.
trap '[ "${!-}" ] || exit 1; kill -TERM "$!"' TERM INT
"$@" &
wait "$!"
code=$?
while kill -0 "$!" 2> /dev/null; do # the signal had ended the wait
    wait "$!"
    code=$?
done
exit $((code == 0 ? 1 : code))
