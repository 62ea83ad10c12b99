# One call on nvidia-h200-x2: the README's table of one run, plain and checkpointed (70.8). About 62 s each.
sed '/^for n in 2 4/,$d' .gpu/sh/a.sh > /tmp/head.sh
. /tmp/head.sh; ln -sfn /tmp/base /tmp/p_base
meas() { local n=$1 v=$2; shift 2; [ $(left) -lt 45 ] && { echo "$n: no time"; return; }
 local b=$(date +%s); PYTHONPATH=/tmp/p_$v:$PWD TORCH_EXTENSIONS_DIR=/tmp/x_$v timeout $(left) python3 -m deepspeed.launcher.runner --num_gpus 2 --module benchmarks.measure --shape qwen3-8b --adam fused --steps 21 --warm 8 --json /tmp/$n.json "$@" > $OUT/$n.log 2>&1
 echo "$n rc $? in $(( $(date +%s)-b )) s"; grep -E "median|forward, s|backward, s|peak of the (back|step)|loss of|Error" $OUT/$n.log | cut -c1-130 | head -9; cp /tmp/$n.json $OUT; }
for c in "" "--checkpoint"; do s=${c:+c}
meas kept$s engines $c; meas shr$s engines $c --shard all --remainders; meas f_re$s engines $c --system fsdp2-resharded; meas f_kept$s engines $c --system fsdp2-kept
for z in 1 2 3; do PYTHONPATH= meas z$z$s base $c --system zero --stage $z; done
done
echo "end $(( $(date +%s)-t0 )) s"
