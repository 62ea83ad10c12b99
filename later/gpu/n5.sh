export NCCL_NVLS_ENABLE=0 TORCH_CUDA_ARCH_LIST=9.0 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
R=$PWD; t0=$(date +%s); LIMIT=${LIMIT:-280}
left() { echo $(( LIMIT - $(date +%s) + t0 )); }
python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/p_engines .gpu/deps/*.whl .gpu/w_engines/*.whl &
python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/base .gpu/deps/*.whl .gpu/base/*.whl & wait
export PYTHONPATH=/tmp/p_engines TORCH_EXTENSIONS_DIR=/tmp/x_engines
(cd /tmp; python3 -c "from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module; reducer_module(); print('built')" 2>&1 | tail -1)
echo "built $(( $(date +%s)-t0 )) s"
timeout 40 torchrun --nproc_per_node 2 .gpu/probe.py 2>&1 | grep -E "fresh|after|plain|with|Error" | head
cd $R/.gpu/t_engines
meas() { local n=$1; shift; [ $(left) -lt 45 ] && { echo "$n: no time"; return; }
 local b=$(date +%s); PYTHONPATH=/tmp/p_engines:$PWD timeout $(left) python3 -m deepspeed.launcher.runner --num_gpus 2 --module benchmarks.measure --shape qwen3-8b --adam fused --steps 21 --warm 8 --json $OUT/$n.json "$@" > $OUT/$n.log 2>&1
 echo "$n rc $? in $(( $(date +%s)-b )) s"; grep -E "median|forward, s|backward, s|peak of the backward|copy engines|wait for|loss of|Error" $OUT/$n.log | cut -c1-200 | head -12; }
meas e_kept
meas f_kept --system fsdp2-kept
PYTHONSAFEPATH=1 timeout 60 torchrun --nproc_per_node 2 tests/features/copy_engines/carry.py --only training > $OUT/carry.log 2>&1; grep -E "^training|^a rank dies" $OUT/carry.log | cut -c1-150
PYTHONSAFEPATH=1 timeout -s INT $(left) python3 -m pytest -v $TESTS --gpu --fewer-cases --tb=short -n 14 --dist worksteal --base /tmp/base -p no:cacheprovider > $OUT/tests.log 2>&1; grep -c PASSED $OUT/tests.log; grep " FAILED" $OUT/tests.log | cut -c1-200 | head -20; grep -E "^E  " $OUT/tests.log | cut -c1-220 | sort | uniq -c | sort -rn | head -20; tail -1 $OUT/tests.log | cut -c1-200
echo "end $(( $(date +%s)-t0 )) s"
