export NCCL_NVLS_ENABLE=0 TORCH_CUDA_ARCH_LIST=9.0 PYTHONSAFEPATH=1 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
R=$PWD; t0=$(date +%s); LIMIT=${LIMIT:-300}
left() { echo $(( LIMIT - $(date +%s) + t0 )); }
python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/p_engines .gpu/deps/*.whl .gpu/w_engines/*.whl &
python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/base .gpu/deps/*.whl .gpu/base/*.whl & wait
export PYTHONPATH=/tmp/p_engines TORCH_EXTENSIONS_DIR=/tmp/x_engines
(cd /tmp; python3 -c "from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module; reducer_module(); print('built')" 2>&1 | tail -1)
echo "built $(( $(date +%s)-t0 )) s"
cd $R/.gpu/t_engines
timeout 100 torchrun --nproc_per_node 2 tests/features/copy_engines/carry.py > $OUT/carry.log 2>&1; echo "carry rc $?"; grep -E "ok |WRONG|ranks on" $OUT/carry.log | cut -c1-150
echo "carried $(( $(date +%s)-t0 )) s"
timeout -s INT $(left) python3 -m pytest -v $TESTS --gpu --fewer-cases --tb=short -n 14 --dist worksteal --base /tmp/base -p no:cacheprovider > $OUT/tests.log 2>&1; grep -c PASSED $OUT/tests.log; grep "FAILED" $OUT/tests.log | cut -c1-200 | head; grep -E "^E  " $OUT/tests.log | cut -c1-220 | head -40; tail -3 $OUT/tests.log | cut -c1-200
echo "end $(( $(date +%s)-t0 )) s"
