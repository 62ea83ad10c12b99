# One call on nvidia-h200-x2: mixtures of experts (68.1, 68.2). Peaks of the issue with older code: kept 93.1, sharded R
# 78.6, FSDP2 kept 96.9, resharded 82.4 GiB; 0.357, 0.368, 0.385, 0.412 s. `fits`: whole model, 8 bits: 118.5 GiB.
sed '/^for n in 2 4/,$d' .gpu/sh/a.sh > /tmp/head.sh
. /tmp/head.sh
meas() { local n=$1 v=$2; shift 2; [ $(left) -lt 40 ] && { echo "$n: no time"; return; }
 local b=$(date +%s); PYTHONPATH=/tmp/p_$v:$PWD TORCH_EXTENSIONS_DIR=/tmp/x_$v timeout $(left) python3 -m deepspeed.launcher.runner --num_gpus 2 --module benchmarks.measure --shape qwen3-30b-a3b --adam fused --json /tmp/$n.json "$@" > $OUT/$n.log 2>&1
 echo "$n rc $? in $(( $(date +%s)-b )) s"; grep -E "median|forward, s|backward, s|peak of the (back|step)|loss of|Error" $OUT/$n.log | cut -c1-130 | head -9; cp /tmp/$n.json $OUT; }
M="--layers 12 --micro-batch 4 --steps 16 --warm 6"
meas kept engines $M --trace /tmp/kept.json.gz; meas shr engines $M --shard all --remainders
meas f_kept engines $M --system fsdp2-kept; meas f_re engines $M --system fsdp2-resharded; meas off engines $M --system zero
PYTHONPATH=/tmp/p_engines:$PWD timeout 60 python3 -m benchmarks.idle /tmp/kept.json.gz 2>&1 | cut -c1-130 | head -30
meas whole engines --shard all --remainders --states 8bit --checkpoint --stage 2 --micro-batch 2 --steps 20 --warm 8 --brief
echo "end $(( $(date +%s)-t0 )) s"
