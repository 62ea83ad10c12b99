export NCCL_NVLS_ENABLE=0 TORCH_CUDA_ARCH_LIST=9.0 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
R=$PWD; t0=$(date +%s); LIMIT=${LIMIT:-540}
left() { echo $(( LIMIT - $(date +%s) + t0 )); }
for p in "p_engines w_engines" "p_main fork" "base base"; do set -- $p; python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/$1 .gpu/deps/*.whl .gpu/$2/*.whl & done; wait
B="from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module; reducer_module(); print('built')"
(cd /tmp; for p in engines main; do PYTHONSAFEPATH=1 PYTHONPATH=/tmp/p_$p TORCH_EXTENSIONS_DIR=/tmp/x_$p python3 -c "$B" 2>&1 | tail -1 & done; wait)
echo "built $(( $(date +%s)-t0 )) s"
cd $R/.gpu/t_engines
PYTHONSAFEPATH=1 PYTHONPATH=/tmp/p_engines TORCH_EXTENSIONS_DIR=/tmp/x_engines timeout 100 torchrun --nproc_per_node 2 tests/features/copy_engines/carry.py > $OUT/carry.log 2>&1; echo "carry rc $?"; grep -E "ok |WRONG|ranks on|Error" $OUT/carry.log | cut -c1-150
meas() { local n=$1 v=$2; shift 2; [ $(left) -lt 45 ] && { echo "$n: no time"; return; }
 local b=$(date +%s); PYTHONPATH=/tmp/p_$v:$PWD TORCH_EXTENSIONS_DIR=/tmp/x_$v timeout $(left) python3 -m deepspeed.launcher.runner --num_gpus 2 --module benchmarks.measure --shape qwen3-8b --adam fused --steps ${STEPS:-21} --warm 8 --json /tmp/$n.json "$@" > $OUT/$n.log 2>&1
 echo "$n rc $? in $(( $(date +%s)-b )) s"; grep -E "median|forward, s|backward, s|peak of the backward|set up|copy engines|wait for|loss of|Error" $OUT/$n.log | cut -c1-200 | head -12; }
meas u_kept engines
meas f_kept engines --system fsdp2-kept
[ -n "$MAIN" ] && meas m_kept main
PYTHONSAFEPATH=1 PYTHONPATH=/tmp/p_engines TORCH_EXTENSIONS_DIR=/tmp/x_engines timeout -s INT $(left) python3 -m pytest -v $TESTS --gpu --fewer-cases --tb=short -n 14 --dist worksteal --base /tmp/base -p no:cacheprovider > $OUT/tests.log 2>&1; grep -c PASSED $OUT/tests.log; grep " FAILED" $OUT/tests.log | cut -c1-200 | head -20; grep -E "^E  " $OUT/tests.log | cut -c1-220 | sort | uniq -c | sort -rn | head -20; tail -1 $OUT/tests.log | cut -c1-200
echo "end $(( $(date +%s)-t0 )) s"
