export NCCL_NVLS_ENABLE=0 TORCH_CUDA_ARCH_LIST=9.0 PYTHONSAFEPATH=1 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
R=$PWD; t0=$(date +%s); LIMIT=${LIMIT:-262}
left() { echo $(( LIMIT - $(date +%s) + t0 )); }
python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/p_engines .gpu/deps/*.whl .gpu/w_engines/*.whl &
python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/p_main .gpu/deps/*.whl .gpu/fork/*.whl & wait
BUILD="from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module; reducer_module(); print('built')"
for n in engines main; do (cd /tmp; PYTHONPATH=/tmp/p_$n TORCH_EXTENSIONS_DIR=/tmp/x_$n python3 -c "$BUILD" 2>&1 | tail -1) & done; wait
echo "built $(( $(date +%s)-t0 )) s"
meas() { # name system-dir args
 local n=$1 w=$2; shift 2; [ $(left) -lt 25 ] && { echo "$n: no time"; return; }
 if [ $w = main ]; then cd $R; else cd $R/.gpu/t_engines; fi
 local b=$(date +%s); PYTHONSAFEPATH= PYTHONPATH=/tmp/p_$w:$PWD TORCH_EXTENSIONS_DIR=/tmp/x_$w timeout $(left) python3 -m deepspeed.launcher.runner --num_gpus 2 --module benchmarks.measure --shape qwen3-8b --adam fused --steps 15 --warm 7 --json $OUT/$n.json "$@" > $OUT/$n.log 2>&1
 echo "$n rc $? in $(( $(date +%s)-b )) s"; grep -E "median|forward|backward|step  |peak|copy|allocated" $OUT/$n.log | head -14; grep -E "Error|error:" $OUT/$n.log | head -4 | cut -c1-300; cd $R
}
meas e_kept engines
meas m_kept main
meas e_shard engines --shard all --remainders
[ $(left) -gt 30 ] && { cd $R/.gpu/t_engines; PYTHONPATH=/tmp/p_engines TORCH_EXTENSIONS_DIR=/tmp/x_engines timeout $(left) torchrun --nproc_per_node 2 tests/features/copy_engines/carry.py > $OUT/carry.log 2>&1; echo "carry rc $?"; tail -32 $OUT/carry.log | cut -c1-160; }
echo "end $(( $(date +%s)-t0 )) s"
