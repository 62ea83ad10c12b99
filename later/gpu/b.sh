export NCCL_NVLS_ENABLE=0 TORCH_CUDA_ARCH_LIST=9.0 PYTHONSAFEPATH=1 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
R=$PWD; t0=$(date +%s)
for n in engines long; do rm -rf /tmp/p_$n; python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/p_$n .gpu/deps/*.whl .gpu/w_$n/*.whl & done; wait
BUILD="from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module; reducer_module(); print('built')"
(PYTHONPATH=/tmp/p_long TORCH_EXTENSIONS_DIR=/tmp/x_long python3 -c "$BUILD" > /tmp/bl.log 2>&1) &
if [ -n "$E2" ]; then
cd $R/.gpu/t_engines; export PYTHONPATH=/tmp/p_engines TORCH_EXTENSIONS_DIR=/tmp/x_engines
python3 -c "$BUILD" 2>&1 | tail -3; echo "engines built $(( $(date +%s)-t0 )) s"
timeout 75 torchrun --nproc_per_node 2 tests/features/copy_engines/carry.py > $OUT/e2.log 2>&1; echo "e2 rc $?"
timeout 75 torchrun --nproc_per_node 4 --master-port 29511 tests/features/copy_engines/carry.py > $OUT/e4.log 2>&1; echo "e4 rc $?"
tail -25 $OUT/e2.log | cut -c1-180; echo; tail -25 $OUT/e4.log | cut -c1-180
fi
wait; cat /tmp/bl.log | tail -1
echo "at $(( $(date +%s)-t0 )) s"
if [ -n "$LONG" ]; then cd $R/.gpu/t_long; export PYTHONPATH=/tmp/p_long:. TORCH_EXTENSIONS_DIR=/tmp/x_long; unset PYTHONSAFEPATH
timeout $((LONG+40)) python3 -m benchmarks.lengths --out $OUT --seconds $LONG 2>&1 | tail -45; fi
echo "end $(( $(date +%s)-t0 )) s"
