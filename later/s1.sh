export NCCL_NVLS_ENABLE=0 TORCH_CUDA_ARCH_LIST=9.0 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore PYTHONSAFEPATH=1
R=$PWD; t0=$(date +%s); LIMIT=${LIMIT:-540}
left() { echo $(( LIMIT - $(date +%s) + t0 )); }
for p in "p_engines w_engines" "p_main fork" "base base"; do set -- $p; python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/$1 .gpu/deps/*.whl .gpu/$2/*.whl & done; wait
B="from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module; reducer_module(); print('built')"
(cd /tmp; for p in engines main; do PYTHONPATH=/tmp/p_$p TORCH_EXTENSIONS_DIR=/tmp/x_$p python3 -c "$B" 2>&1 | tail -1 & done; wait)
echo "built $(( $(date +%s)-t0 )) s"; nproc; nvidia-smi -L | wc -l
cd $R/.gpu/t_engines
export PYTHONPATH=/tmp/p_engines TORCH_EXTENSIONS_DIR=/tmp/x_engines
timeout 120 torchrun --nproc_per_node 2 tests/features/copy_engines/carry.py --only training,hangs > $OUT/carry.log 2>&1; echo "carry rc $?"; grep -E "^\[.*(ok|WRONG)|Error" $OUT/carry.log | grep -v INFO | cut -c1-170
timeout -s INT $(left) python3 -m pytest -v $TESTS --gpu --tb=short -n ${N:-32} --dist worksteal --base /tmp/base -p no:cacheprovider > $OUT/tests.log 2>&1; grep -c PASSED $OUT/tests.log; grep " FAILED" $OUT/tests.log | cut -c1-180 | head -40; grep -E "^E  " $OUT/tests.log | cut -c1-200 | sort | uniq -c | sort -rn | head -30; tail -1 $OUT/tests.log | cut -c1-200
echo "end $(( $(date +%s)-t0 )) s"
