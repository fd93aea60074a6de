#!/usr/bin/env bash
# Set up what a run inside MindSpeed-MM on a CPU, and tests/contract, need: bash tests/contract/setup.sh DIR [PAIR ...]
# With --latest before DIR: the newest trees, as the pair latest, and a page of what has drifted since v26.1.0.
#
#   DIR/venv                      one interpreter for both routes, all pairs and this project (PyTorch 2.7.1, 6 GB)
#   DIR/megatron                  Megatron-LM core_v0.12.1, which the old route trains in
#   DIR/PAIR/mindspeed_mm, .../mindspeed          the trees; PAIR: v26.0.0 v26.0.0-93c45456 v26.1.0 master (all)
#   DIR/PAIR/old.env, DIR/PAIR/native.env         to be sourced: a shell that trains by that route, and its tests
#
# What is there already is kept. Variables:
#   NPU_ON_CPU=DIR    a folder with a torch_npu that answers on a CPU, as tests/mock_accelerator has; on an NPU leave it out
#   PYTHON=python3    the interpreter to start from, 3.10 or 3.11
#   MINDSPEED_MM_GIT, MINDSPEED_GIT, MEGATRON_GIT    other addresses, or git folders of this machine
set -euo pipefail

MINDSPEED_MM_GIT=${MINDSPEED_MM_GIT:-https://gitcode.com/Ascend/MindSpeed-MM.git}
MINDSPEED_GIT=${MINDSPEED_GIT:-https://gitcode.com/Ascend/MindSpeed.git}
MEGATRON_GIT=${MEGATRON_GIT:-https://github.com/NVIDIA/Megatron-LM.git}

latest=
[ "${1:-}" != --latest ] || { latest=yes; shift; }
[ $# -ge 1 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
mkdir -p "$1"
dir=$(cd "$1" && pwd)
shift
pairs=("$@")
[ $# -ge 1 ] || pairs=(v26.0.0 v26.0.0-93c45456 v26.1.0 master)
if [ "$latest" ]; then
  pairs=(v26.1.0 latest)
  rm -rf "$dir/latest"
fi

newest() { # ADDRESS: its newest commit
  git ls-remote "$1" HEAD | cut -f 1
}

revisions() { # PAIR: the commits of MindSpeed-MM and of MindSpeed
  case $1 in
    v26.0.0) echo 6c45b4869f9938892b982a203cc121803c345db2 3c44c134f396fc14a22a38934c7d5d8bedb37ff5 ;;
    v26.0.0-93c45456) echo 6c45b4869f9938892b982a203cc121803c345db2 93c45456c7044bacddebc5072316c01006c938f9 ;;
    v26.1.0) echo d0b964b55fb33b4eccec72513d8741d391ec13c7 57a33053c4eccd5b14aa58e3ca595ab414e65b94 ;;
    master) echo 57069cd55a8ab16d5affe379a2e2c5f0a4d962b9 028de58ca629d035185b00ff7d1eb7eff4f7fd48 ;;
    latest) echo "$(newest "$MINDSPEED_MM_GIT") $(newest "$MINDSPEED_GIT")" ;;
    *) echo "$1 is no pair: v26.0.0, v26.0.0-93c45456, v26.1.0 or master" >&2; return 2 ;;
  esac
}

tree() { # FOLDER ADDRESS REVISION PATH...: unpack these paths of one commit
  local folder=$1 address=$2 revision=$3 how=--filter=blob:none
  [ ! -e "$folder" ] || return 0
  [ ! -d "$address" ] || how=--shared
  echo "$folder: $revision of $address"
  rm -rf "$folder.part"
  git clone --quiet --no-checkout $how "$address" "$folder.part"
  git -C "$folder.part" sparse-checkout set --no-cone "${@:4}"
  git -C "$folder.part" -c advice.detachedHead=false checkout --quiet "$revision"
  mv "$folder.part" "$folder"
}

environment() { # PAIR old|native: what a shell of that route exports
  local here=$dir/$1 megatron=$dir/megatron
  [ "$2" = old ] || megatron=
  cat <<EOF
# The $2 route of MindSpeed-MM $1; written by tests/contract/setup.sh
export MINDSPEED_MM_HOME=$here/mindspeed_mm MINDSPEED_HOME=$here/mindspeed
export MINDSPEED_MM_PYTHON=$dir/venv/bin/python MM_TOOL=$here/mindspeed_mm/mindspeed_mm/tools/tools.json
export PYTHONPATH=${NPU_ON_CPU:+$NPU_ON_CPU:}$here/mindspeed_mm:$here/mindspeed:${megatron:+$megatron:}$root
export PATH=$dir/venv/bin:\$PATH ${NPU_ON_CPU:+NPU_ON_CPU=$NPU_ON_CPU}
export TORCHDYNAMO_DISABLE=1 CUDA_DEVICE_MAX_CONNECTIONS=2 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
EOF
  if [ "$2" = old ]; then
    echo "export MEGATRON_HOME=$dir/megatron; unset NON_MEGATRON"
  else
    echo "export NON_MEGATRON=true; unset MEGATRON_HOME"
  fi
}

for pair in "${pairs[@]}"; do revisions "$pair" >/dev/null; done
tree "$dir/megatron" "$MEGATRON_GIT" core_v0.12.1 /megatron/ /pretrain_gpt.py
for pair in "${pairs[@]}"; do
  read -r mm mindspeed <<<"$(revisions "$pair")"
  mkdir -p "$dir/$pair"
  tree "$dir/$pair/mindspeed_mm" "$MINDSPEED_MM_GIT" "$mm" \
    /mindspeed_mm/ /checkpoint/ /bridge/ /scripts/ /pretrain_sora.py /pyproject.toml
  tree "$dir/$pair/mindspeed" "$MINDSPEED_GIT" "$mindspeed" /mindspeed/ /setup.py /requirements.txt
  for route in old native; do environment "$pair" $route >"$dir/$pair/$route.env"; done
done

if [ ! -e "$dir/venv/complete" ]; then
  "${PYTHON:-python3}" -m venv "$dir/venv"
  "$dir/venv/bin/python" -m pip install --quiet -r "$root/requirements/base.txt" -r "$root/requirements/mindspeed-mm.txt"
  touch "$dir/venv/complete"
fi

if [ "$latest" ]; then
  (. "$dir/latest/old.env" && python "$root/tests/contract/drift.py" "$dir/v26.1.0" "$dir/latest") | tee "$dir/drift.md"
fi
echo "Ready. For example:"
for pair in "${pairs[@]}"; do echo "  (. $dir/$pair/old.env && cd $root && python -m pytest -n 0 tests/contract)"; done
