sed '/^for n in 2 4/,$d' .gpu/sh/a.sh > /tmp/head.sh
. /tmp/head.sh
$E python3 $R/.gpu/sh/sums.py 2>&1 | tail -4
for n in 2 4; do $E timeout 100 torchrun --nproc_per_node $n tests/features/copy_engines/carry.py > $OUT/carry$n.log 2>&1; echo "carry $n rc $?"; grep -E "^\[.*(WRONG|GB/s|in a row|memory of|memory on)" $OUT/carry$n.log | cut -c1-150; done
meas() { local n=$1 v=$2; shift 2; [ $(left) -lt 50 ] && { echo "$n: no time"; return; }
 local b=$(date +%s); PYTHONPATH=/tmp/p_$v:$PWD TORCH_EXTENSIONS_DIR=/tmp/x_$v timeout $(left) python3 -m deepspeed.launcher.runner --num_gpus 2 --module benchmarks.measure --shape qwen3-8b --adam fused --steps 21 --warm 8 --json /tmp/$n.json "$@" > $OUT/$n.log 2>&1
 echo "$n rc $? in $(( $(date +%s)-b )) s"; grep -E "median|forward, s|backward, s|peak of the (back|step)|loss of|Error" $OUT/$n.log | cut -c1-130 | head -9; cp /tmp/$n.json $OUT; }
meas i2 engines
meas m2 main
meas fdef engines --system fsdp2-resharded
meas isr engines $SHARD
$E timeout -s INT $(left) python3 -m pytest -v $TESTS --gpu --fewer-cases --tb=short -n 16 --dist worksteal --base /tmp/base -p no:cacheprovider > $OUT/tests.log 2>&1; grep -c PASSED $OUT/tests.log; grep " FAILED" $OUT/tests.log | cut -c1-180 | head -40; grep -E "^E  " $OUT/tests.log | cut -c1-200 | sort | uniq -c | sort -rn | head -30; tail -1 $OUT/tests.log | cut -c1-200
echo "end $(( $(date +%s)-t0 )) s"
