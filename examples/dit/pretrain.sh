#!/usr/bin/env bash
# Train a DiT: bash examples/dit/pretrain.sh [flags of pretrain_dit.py, which override those of train.args]
# It finds the Python of this checkout; the run itself is that of mm-dit train.
#
#   CONFIG=DIR              folder with model.json, data.json, train.args, or an embedded name (default: this one, digits)
#   AI_FRAMEWORK=NAME       pytorch (default, launched by torchrun) or mindspore (launched by msrun)
#   NPUS_PER_NODE=N         processes on this node (default: one per accelerator; on a CPU 1, or 2 with mindspore)
#   MM_TOOL=FILE            tools.json of MindSpeed-MM, required by --host mindspeed-mm (docs/mindspeed_mm.md)
#   NNODES NODE_RANK MASTER_ADDR MASTER_PORT    several nodes; run the script on each
#   OMP_NUM_THREADS=N       threads of each process (default: the processes share the cores)
#   OMP_WAIT_POLICY=KIND    passive: waiting threads sleep; active: they spin (default: they spin briefly, then sleep)
#
# Running it again resumes from the last checkpoint. Paths are relative to the working directory. A single node listens
# on its loopback address only, on a free port unless MASTER_PORT names one.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
export AI_FRAMEWORK=${AI_FRAMEWORK:-pytorch}

venv=$root/.venv
[ "$AI_FRAMEWORK" = mindspore ] && venv=$root/.venv-mindspore
if [ -z "${VIRTUAL_ENV:-}" ] && [ -x "$venv/bin/python" ]; then
  export PATH="$venv/bin:$PATH"
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

exec python -m mindspeed_mm_dit train "${CONFIG:-$here}" "$@"
