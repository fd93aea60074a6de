#!/usr/bin/env bash
# Train a DiT: bash examples/dit/pretrain.sh [flags of pretrain_dit.py, which override those of train.args]
#
#   CONFIG=DIR          folder with model.json, data.json, fsdp2.yaml, train.args (default: this one, digits)
#   NPUS_PER_NODE=N     processes on this node (default: one per accelerator, one on a CPU)
#   NNODES NODE_RANK MASTER_ADDR MASTER_PORT    several nodes; run the script on each
#
# Running it again resumes from the last checkpoint. Paths are relative to the working directory.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
CONFIG=$(cd "${CONFIG:-$here}" && pwd)
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-}

if [ -z "${VIRTUAL_ENV:-}" ] && [ -x "$root/.venv/bin/python" ]; then
  export PATH="$root/.venv/bin:$PATH"
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

count_accelerators() {
  if command -v npu-smi >/dev/null; then npu-smi info -l | grep -c 'NPU ID'
  elif command -v nvidia-smi >/dev/null; then nvidia-smi -L | grep -c '^GPU'
  else echo 1; fi
}
NPUS_PER_NODE=${NPUS_PER_NODE:-$(count_accelerators || echo 1)}

# On a CPU the processes share the cores; more threads than cores would only get in each other's way.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(( $(nproc) > NPUS_PER_NODE ? $(nproc) / NPUS_PER_NODE : 1 ))}

mapfile -t config_args < <(sed -e 's/#.*//' "$CONFIG/train.args" | xargs -n 1)
train=("$root/pretrain_dit.py" --mm-model "$CONFIG/model.json" --mm-data "$CONFIG/data.json"
       --fsdp2-config-path "$CONFIG/fsdp2.yaml" "${config_args[@]}" "$@")

if [ "$NNODES" = 1 ] && [ "$NPUS_PER_NODE" = 1 ]; then
  exec python "${train[@]}"
elif [ "$NNODES" = 1 ] && [ -z "$MASTER_PORT" ]; then
  exec python -m torch.distributed.run --standalone --nproc_per_node "$NPUS_PER_NODE" "${train[@]}"
else
  exec python -m torch.distributed.run --nproc_per_node "$NPUS_PER_NODE" --nnodes "$NNODES" \
    --node_rank "$NODE_RANK" --master_addr "$MASTER_ADDR" --master_port "${MASTER_PORT:-6000}" "${train[@]}"
fi
