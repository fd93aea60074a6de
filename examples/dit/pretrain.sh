#!/usr/bin/env bash
# Train a DiT: bash examples/dit/pretrain.sh [flags of pretrain_dit.py, which override those of train.args]
#
#   CONFIG=DIR              folder with model.json, data.json, fsdp2.yaml, train.args (default: this one, digits)
#   AI_FRAMEWORK=NAME       pytorch (default, launched by torchrun) or mindspore (launched by msrun)
#   NPUS_PER_NODE=N         processes on this node (default: one per accelerator; on a CPU 1, or 2 with mindspore)
#   MM_TOOL=FILE            tools.json of MindSpeed-MM, which its host wants (docs/mindspeed_mm.md)
#   NNODES NODE_RANK MASTER_ADDR MASTER_PORT    several nodes; run the script on each
#
# Running it again resumes from the last checkpoint. Paths are relative to the working directory.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
CONFIG=${CONFIG:-$here}
AI_FRAMEWORK=${AI_FRAMEWORK:-pytorch}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
MASTER_PORT=${MASTER_PORT:-}

fail() { echo "$1" >&2; exit 2; }

[ -f "$CONFIG/train.args" ] || fail "CONFIG=$CONFIG: is no folder with a train.args, such as $here/imagenet256"
CONFIG=$(cd "$CONFIG" && pwd)
case $AI_FRAMEWORK in
  pytorch) venv=$root/.venv cpu_processes=1 ;;
  mindspore) venv=$root/.venv-mindspore cpu_processes=2 ;;
  *) fail "AI_FRAMEWORK=$AI_FRAMEWORK: must be pytorch or mindspore" ;;
esac
if [ -z "${VIRTUAL_ENV:-}" ] && [ -x "$venv/bin/python" ]; then
  export PATH="$venv/bin:$PATH"
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

count_accelerators() {  # prints nothing where there is none
  if ! command -v npu-smi >/dev/null && ! command -v nvidia-smi >/dev/null; then return; fi
  if [ "$AI_FRAMEWORK" = pytorch ]; then
    python -c 'import torch; print(torch.accelerator.is_available() and torch.accelerator.device_count() or "")'
  elif [ -n "${ASCEND_RT_VISIBLE_DEVICES:-}" ]; then
    tr ',' '\n' <<< "$ASCEND_RT_VISIBLE_DEVICES" | grep -c .
  elif command -v npu-smi >/dev/null; then
    npu-smi info -l | grep 'NPU ID' | wc -l
  fi
}
NPUS_PER_NODE=${NPUS_PER_NODE:-$(count_accelerators)}
NPUS_PER_NODE=${NPUS_PER_NODE:-$cpu_processes}

# On a CPU the processes share the cores; more threads than cores would only get in each other's way.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(( $(nproc) > NPUS_PER_NODE ? $(nproc) / NPUS_PER_NODE : 1 ))}

export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-2}  # FSDP2 in MindSpeed-MM refuses 1

mapfile -t config_args < <(sed -e 's/#.*//' "$CONFIG/train.args" | xargs -n 1)
train=("$root/pretrain_dit.py" --ai-framework "$AI_FRAMEWORK" --mm-model "$CONFIG/model.json"
       --mm-data "$CONFIG/data.json" --fsdp2-config-path "$CONFIG/fsdp2.yaml"
       ${MM_TOOL:+--mm-tool "$MM_TOOL"} "${config_args[@]}" "$@")

if [ "$NNODES" = 1 ] && [ "$NPUS_PER_NODE" = 1 ]; then
  exec python "${train[@]}"
elif [ "$AI_FRAMEWORK" = pytorch ] && [ "$NNODES" = 1 ] && [ -z "$MASTER_PORT" ]; then
  exec python -m mindspeed_mm_dit.training.pytorch.launch --standalone --nproc_per_node "$NPUS_PER_NODE" "${train[@]}"
elif [ "$AI_FRAMEWORK" = pytorch ]; then
  exec python -m mindspeed_mm_dit.training.pytorch.launch --nproc_per_node "$NPUS_PER_NODE" --nnodes "$NNODES" \
    --node_rank "$NODE_RANK" --master_addr "$MASTER_ADDR" --master_port "${MASTER_PORT:-6000}" "${train[@]}"
fi

msrun=$(command -v msrun) || fail "msrun is not on PATH: MindSpore is not installed here; make demo-mindspore sets it up"
python=$(command -v python) || fail "msrun starts 'python', and there is none on PATH"
[ "$(dirname "$msrun")" = "$(dirname "$python")" ] \
  || fail "msrun starts the first 'python' on PATH, $python, which is not the one beside $msrun: put $(dirname "$msrun") first on PATH"
export LOCAL_WORLD_SIZE=$NPUS_PER_NODE
export GLOG_v=${GLOG_v:-3}  # MindSpore's own messages: errors only
msrun --local_worker_num "$NPUS_PER_NODE" --worker_num "$(( NPUS_PER_NODE * NNODES ))" \
  --node_rank "$NODE_RANK" --master_addr "$MASTER_ADDR" --master_port "${MASTER_PORT:-6000}" \
  --log_dir msrun_log --join=True --bind_core=True "${train[@]}" && exit 0
code=$?
# msrun ends with its own traceback; the reason stands in the log of the worker that failed first.
reasons=$(grep -hE '^[A-Za-z.]*(Error|Exception)\b' msrun_log/worker_*.log | tail -n 3) \
  || reasons="no worker wrote an error: one was ended from outside (out of memory, or a signal)"
echo "a worker failed (all logs are in msrun_log/): $reasons" >&2
exit $code
