export NCCL_NVLS_ENABLE=0 TORCH_CUDA_ARCH_LIST=9.0 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
R=$PWD; t0=$(date +%s); LIMIT=${LIMIT:-560}
left() { echo $(( LIMIT - $(date +%s) + t0 )); }
for p in "p_engines w_engines" "p_main fork" "base base"; do set -- $p; python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/$1 .gpu/deps/*.whl .gpu/$2/*.whl & done; wait
B="from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module; reducer_module(); print('built')"
(cd /tmp; for p in engines main; do PYTHONSAFEPATH=1 PYTHONPATH=/tmp/p_$p TORCH_EXTENSIONS_DIR=/tmp/x_$p python3 -c "$B" 2>&1 | tail -1 & done; wait)
echo "built $(( $(date +%s)-t0 )) s"
cd $R/.gpu/t_engines
E="env PYTHONPATH=/tmp/p_engines TORCH_EXTENSIONS_DIR=/tmp/x_engines PYTHONSAFEPATH=1"
for n in 2 4; do $E timeout 100 torchrun --nproc_per_node $n tests/features/copy_engines/carry.py > $OUT/carry$n.log 2>&1; echo "carry $n rc $?"; grep -E "(ok|WRONG)" $OUT/carry$n.log | cut -c1-150; done
$E timeout -s INT 120 python3 -m pytest -v tests/features/shard_parameters/test_shard_order.py -k "uncompiled and bucket40" --gpu --tb=short -n 6 -p no:cacheprovider > $OUT/hang.log 2>&1; grep -E "(PASSED|FAILED) tests" $OUT/hang.log | cut -c1-150 | sort -u; tail -1 $OUT/hang.log
meas() { local n=$1 v=$2; shift 2; [ $(left) -lt 50 ] && { echo "$n: no time"; return; }
 local b=$(date +%s); PYTHONPATH=/tmp/p_$v:$PWD TORCH_EXTENSIONS_DIR=/tmp/x_$v timeout $(left) python3 -m deepspeed.launcher.runner --num_gpus 2 --module benchmarks.measure --shape qwen3-8b --adam fused --steps 21 --warm 8 --json /tmp/$n.json "$@" > $OUT/$n.log 2>&1
 echo "$n rc $? in $(( $(date +%s)-b )) s"; grep -E "median|forward, s|backward, s|peak of the|loss of|Error" $OUT/$n.log | cut -c1-130 | head -9; cp /tmp/$n.json $OUT; }
meas r2 engines --trace /tmp/r2.json.gz
meas f2 engines --system fsdp2-kept
meas m2 main
CUDA_DEVICE_MAX_CONNECTIONS=32 meas r2_32 engines
cp /tmp/r2.json.gz $OUT/
PYTHONPATH=/tmp/p_engines:$PWD timeout 60 python3 -m benchmarks.idle /tmp/r2.json.gz 2>&1 | cut -c1-130 | head -30
echo "end $(( $(date +%s)-t0 )) s"
