# On four GPUs: builds, checks the carrier and the hang, measures beside FSDP2, and takes a trace apart.
export NCCL_NVLS_ENABLE=0 TORCH_CUDA_ARCH_LIST=9.0 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
R=$PWD; t0=$(date +%s); LIMIT=${LIMIT:-560}
left() { echo $(( LIMIT - $(date +%s) + t0 )); }
for p in "p_engines w_engines" "base base"; do set -- $p; python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/$1 .gpu/deps/*.whl .gpu/$2/*.whl & done; wait
export PYTHONPATH=/tmp/p_engines TORCH_EXTENSIONS_DIR=/tmp/x_engines PYTHONSAFEPATH=1
(cd /tmp; python3 -c "from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module; reducer_module(); print('built')" 2>&1 | tail -1)
echo "built $(( $(date +%s)-t0 )) s"
cd $R/.gpu/t_engines
for n in 2 4; do timeout 100 torchrun --nproc_per_node $n tests/features/copy_engines/carry.py > $OUT/carry$n.log 2>&1; echo "carry $n rc $?"; grep -E "^[a-z].*(ok|WRONG) " $OUT/carry$n.log | cut -c1-150; done
timeout -s INT 120 python3 -m pytest -v tests/features/shard_parameters/test_shard_order.py -k "uncompiled and bucket40" --gpu --tb=short -n 6 -p no:cacheprovider > $OUT/hang.log 2>&1; grep -E "(PASSED|FAILED) tests" $OUT/hang.log | cut -c1-150 | sort -u
meas() { local n=$1 g=$2; shift 2; [ $(left) -lt 50 ] && { echo "$n: no time"; return; }; local b=$(date +%s); PYTHONSAFEPATH= PYTHONPATH=/tmp/p_engines:$PWD timeout $(left) python3 -m deepspeed.launcher.runner --num_gpus $g --module benchmarks.measure --shape qwen3-8b --adam fused --steps 21 --warm 8 --json /tmp/$n.json "$@" > $OUT/$n.log 2>&1; echo "$n rc $? in $(( $(date +%s)-b )) s"; grep -E "median|forward, s|backward, s|peak of the|loss of|Error" $OUT/$n.log | cut -c1-130 | head -9; }
meas r4 4 --trace /tmp/r4.json.gz
meas f4 4 --system fsdp2-kept
meas r2 2
meas f2 2 --system fsdp2-kept
PYTHONSAFEPATH= timeout 60 python3 -m benchmarks.idle /tmp/r4.json.gz 2>&1 | cut -c1-130 | head -24; cp /tmp/r4.json.gz $OUT/
echo "end $(( $(date +%s)-t0 )) s"
