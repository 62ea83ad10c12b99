export NCCL_NVLS_ENABLE=0 TORCH_CUDA_ARCH_LIST=9.0 PYTHONSAFEPATH=1 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
R=$PWD; t0=$(date +%s); LIMIT=${LIMIT:-450}
left() { echo $(( LIMIT - $(date +%s) + t0 )); }
python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/p_engines .gpu/deps/*.whl .gpu/w_engines/*.whl &
python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/base .gpu/deps/*.whl .gpu/base/*.whl & wait
BUILD="from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module; reducer_module(); print('built')"
(cd /tmp; PYTHONPATH=/tmp/p_engines TORCH_EXTENSIONS_DIR=/tmp/x_engines python3 -c "$BUILD" 2>&1 | tail -1)
echo "built $(( $(date +%s)-t0 )) s"
cd $R/.gpu/t_engines
meas() { # name args
 local n=$1; shift; [ $(left) -lt 45 ] && { echo "$n: no time"; return; }
 local b=$(date +%s); PYTHONSAFEPATH= PYTHONPATH=/tmp/p_engines:$PWD TORCH_EXTENSIONS_DIR=/tmp/x_engines timeout $(left) python3 -m deepspeed.launcher.runner --num_gpus 2 --module benchmarks.measure --shape qwen3-8b --adam fused --steps 15 --warm 7 --json $OUT/$n.json "$@" > $OUT/$n.log 2>&1
 echo "$n rc $? in $(( $(date +%s)-b )) s"; grep -E "median|forward|backward|step  |peak|copy|loss" $OUT/$n.log | grep -v "step    [0-9]* of" | head -14; grep -E "Error|error:" $OUT/$n.log | head -4 | cut -c1-300; }
meas e_kept --trace /tmp/e.json.gz
meas e_shard --shard all --remainders --trace /tmp/s.json.gz
for t in e s; do PYTHONSAFEPATH= timeout 60 python3 -m benchmarks.idle /tmp/$t.json.gz 2>&1 | cut -c1-130 | head -30; done
cp /tmp/e.json.gz $OUT/e_trace.json.gz; cp /tmp/s.json.gz $OUT/s_trace.json.gz
PYTHONPATH=/tmp/p_engines TORCH_EXTENSIONS_DIR=/tmp/x_engines timeout 100 torchrun --nproc_per_node 2 tests/features/copy_engines/carry.py > $OUT/carry.log 2>&1; echo "carry rc $?"; tail -32 $OUT/carry.log | cut -c1-150
rm -f $OUT/*.json
[ $(left) -gt 60 ] && { PYTHONPATH=/tmp/p_engines TORCH_EXTENSIONS_DIR=/tmp/x_engines timeout $(left) python3 -m pytest -q tests/features/copy_engines tests/features/overlap_gather tests/core/test_messages.py tests/features/shard_parameters/test_shard_all.py tests/core/test_parity.py --gpu --fewer-cases -n 10 --dist worksteal --base /tmp/base -p no:cacheprovider > $OUT/tests.log 2>&1; tail -25 $OUT/tests.log | cut -c1-200; }
echo "end $(( $(date +%s)-t0 )) s"
