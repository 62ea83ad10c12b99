# One call on nvidia-h200-x2 (about 560 s): copies in place and comparisons before and after, "deep", the new GPU tests.
# Needs .gpu/{t_engines,w_engines} (wheel.sh NAME of the branch), .gpu/fork (wheel of an earlier main), .gpu/base.
sed '/^for n in 2 4/,$d' .gpu/sh/a.sh > /tmp/head.sh
. /tmp/head.sh
meas() { local n=$1 v=$2; shift 2; [ $(left) -lt 40 ] && { echo "$n: no time"; return; }
 local b=$(date +%s); PYTHONPATH=/tmp/p_$v:$PWD TORCH_EXTENSIONS_DIR=/tmp/x_$v timeout $(left) python3 -m deepspeed.launcher.runner --num_gpus 2 --module benchmarks.measure --adam fused --json /tmp/$n.json "$@" > $OUT/$n.log 2>&1
 echo "$n rc $? in $(( $(date +%s)-b )) s"; grep -E "median|forward, s|backward, s|peak of the (back|step)|loss of|Error" $OUT/$n.log | cut -c1-130 | head -9; cp /tmp/$n.json $OUT; }
D="--shape deep --seq 16 --steps 120 --warm 60 --brief"
meas deep engines $D; meas deep_not engines $D --no-overlap-gather; meas deep_main main $D; meas deep2 engines $D
Q="--shape qwen3-8b --steps 21 --warm 8"
meas kept engines $Q; meas shr engines $Q --shard all --remainders; meas shr_main main $Q --shard all --remainders
meas l16 engines --shape qwen3-8b --layers 16 --steps 21 --warm 8; meas l16_main main --shape qwen3-8b --layers 16 --steps 21 --warm 8
$E timeout -s INT $(left) python3 -m pytest -v tests/features/overlap_gather/test_readers.py tests/features/shard_parameters/test_comparison.py tests/features/shard_parameters/test_shard_streams.py tests/features/copy_engines tests/core/test_streams.py tests/core/test_options_honoured.py tests/fixes/base/test_whole_checkpoints.py --gpu --fewer-cases --tb=short -n 8 -p no:cacheprovider > $OUT/tests.log 2>&1; grep -c PASSED $OUT/tests.log; grep " FAILED" $OUT/tests.log | cut -c1-180 | head -30; tail -1 $OUT/tests.log | cut -c1-200
echo "end $(( $(date +%s)-t0 )) s"
