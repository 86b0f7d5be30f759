#!/usr/bin/env bash
# Waits until a router says that a server is in service:
#
#   launch/await_servers.sh http://HOST:8000 && python -m glm5_jax.train ...
#
# A trainer that asks before would take the router for a wrong address. Loading a large
# model takes minutes, so this waits without end; who started the servers sees them fail.
set -uo pipefail

url=${1:?name the router: $0 http://HOST:PORT}
asks="import sys, urllib.request as u; u.urlopen(sys.argv[1] + '/health', timeout=5)"
trap 'exit 143' TERM # as the first process of a container, which no default ends
until "${PYTHON:-python}" -c "$asks" "${url%/}" 2>/dev/null; do
  sleep 2
done
