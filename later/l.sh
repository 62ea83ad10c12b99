export NCCL_NVLS_ENABLE=0 TORCH_CUDA_ARCH_LIST=9.0 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
R=$PWD; t0=$(date +%s); LIMIT=${LIMIT:-500}
left() { echo $(( LIMIT - $(date +%s) + t0 )); }
python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/p_engines .gpu/deps/*.whl .gpu/w_engines/*.whl
export PYTHONPATH=/tmp/p_engines TORCH_EXTENSIONS_DIR=/tmp/x_engines
(cd /tmp; python3 -c "from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module; reducer_module(); print('built')" 2>&1 | tail -1)
echo "built $(( $(date +%s)-t0 )) s"; free -g | sed -n 2p
cd $R/.gpu/t_engines; export PYTHONPATH=/tmp/p_engines:$PWD
CUDA_VISIBLE_DEVICES=0 python3 -m benchmarks.lengths --only 8 14 --seconds 330 --out /tmp/l0 > $OUT/l0.log 2>&1 & A=$!
CUDA_VISIBLE_DEVICES=1 python3 -m benchmarks.lengths --only 10 9 11 13 12 --seconds 330 --out /tmp/l1 > $OUT/l1.log 2>&1 & B=$!
wait $A $B; cat $OUT/l0.log $OUT/l1.log | cut -c1-220; cp /tmp/l0/lengths.jsonl $OUT/l0.jsonl; cp /tmp/l1/lengths.jsonl $OUT/l1.jsonl
echo "at $(( $(date +%s)-t0 )) s"
ex() { [ $(left) -lt 25 ] && { echo "$*: no time"; return; }; timeout $(left) python3 -m deepspeed.launcher.runner --num_gpus 2 --module benchmarks.exchanges "$@" > $OUT/ex.log 2>&1; echo "$* rc $?"; tail -3 $OUT/ex.log | cut -c1-200; }
ex sequences --deepcompile
ex sequences --deepcompile --shard
ex sequences
ex experts --deepcompile
ex experts
echo "end $(( $(date +%s)-t0 )) s"
