#!/usr/bin/env bash
# What this project does on a GPU, measured there: bash benchmarks/gpu.sh [PART ...]
#
#   right     golden values of the published DiT and SiT in float32, bf16 and compiled steps against float32, the demo
#   train     images a second of DiT-XL/2, share of the peak, memory beside the plan's;
#             facebookresearch/DiT and diffusers in the same run, all compiled, autocast to bf16, with TensorFloat-32
#   sample    250 steps of DDPM and 20 of DPM-Solver++, against facebookresearch/DiT
#   networks  train steps of FLUX, Stable Diffusion 3.5, Qwen-Image and Wan, some with fewer blocks, against diffusers'
#   loader    JiT-B/16 from JPEG files: images a second of the loader, of a step, and of both
#
# Without a part all of them, one after the other; each leaves a dated file in RESULTS (benchmarks/results).
#
#   DIT=DIR      checkout of facebookresearch/DiT, which needs timm; without it there is no such peer
#   SIZE=tiny    sizes that a CPU finishes in a minute, to try the script: they measure nothing
#   PYTHON=python
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

parts=("$@")
[ $# -ge 1 ] || parts=(right train sample networks loader)
python=${PYTHON:-python}
peer=(${DIT:+--reference "$DIT"})
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

case ${SIZE:-gpu} in
  gpu)
    train=(--preset DiT-XL/2 --batch 128 --rounds 5 --precision bf16 --torch-compile --tf32 --fsdp2)
    sample=(--preset DiT-XL/2 --images 32 --timed-steps 10 --rounds 3 --precision bf16 --torch-compile)
    networks=(--size gpu --precision bf16 --torch-compile --tf32 --rounds 5)
    loader=(--model examples/dit/imagenet256_jit/model.json --jpegs 3000 --workers 14 --precision bf16 --torch-compile)
    demo=() ;;
  tiny)
    train=(--preset DiT-S/8 --size 8 --batch 1 2 --rounds 1 --warm-up 0 --precision bf16)
    sample=(--preset DiT-S/8 --size 8 --images 1 --timed-steps 1 --rounds 1 --warm-up 0 --precision fp32)
    networks=(--precision bf16 --rounds 1 --warm-up 0)
    loader=(--jpegs 40 --batch 16 --rounds 2 --steps 2) demo=(--train-iters 2) ;;
  *) echo "SIZE=$SIZE is neither gpu nor tiny" >&2; exit 2 ;;
esac

right() {
  local golden=tests/golden/data
  "$python" -m mindspeed_mm_dit.cli.main parity --reference $golden/dit_tiny_p2.npz --checkpoint $golden/dit_tiny_p2.pt
  "$python" -m mindspeed_mm_dit.cli.main parity --reference $golden/sit_tiny_p2.npz --checkpoint $golden/sit_tiny_p2.pt
  local flag saved
  for flag in "" --bf16 --torch-compile; do
    saved=$(mktemp -d)
    bash examples/dit/pretrain.sh --save "$saved" --load "$saved" --tensorboard-dir "$saved/tensorboard" \
      ${flag:+"$flag"} "${demo[@]}"
    rm -r "$saved"
  done
}

for part in "${parts[@]}"; do
  echo "== $part"
  case $part in
    right) right ;;
    train) "$python" benchmarks/train_throughput.py --diffusers "${train[@]}" "${peer[@]}" ;;
    sample) "$python" benchmarks/sampling.py "${sample[@]}" "${peer[@]}" ;;
    networks) "$python" benchmarks/network_step.py "${networks[@]}" ;;
    loader) "$python" benchmarks/loader.py "${loader[@]}" ;;
    *) echo "$part is none of right, train, sample, networks, loader" >&2; exit 2 ;;
  esac
done
