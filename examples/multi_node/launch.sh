#!/bin/sh
# Start a training script on one of several machines; run this file on each machine.
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
