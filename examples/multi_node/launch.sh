#!/bin/sh
# Start a script on this machine as one of several: run it on each of them.
set -eu
: "${NODES:?number of machines}" "${GPUS:?processes on each}" "${HEAD:?host:port of the first}"
exec torchrun \
    --nnodes "$NODES" \
    --nproc-per-node "$GPUS" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$HEAD" \
    --rdzv-id "${JOB:-zerotune}" \
    --max-restarts "${RESTARTS:-3}" \
    "$@"
