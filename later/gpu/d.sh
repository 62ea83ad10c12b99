export NCCL_NVLS_ENABLE=0 TORCH_CUDA_ARCH_LIST=9.0 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
cd .gpu/t_engines
PYTHONPATH=/tmp/p_engines:$PWD TORCH_EXTENSIONS_DIR=/tmp/x_engines timeout 100 python3 -m deepspeed.launcher.runner --num_gpus 2 --module benchmarks.measure --shape qwen3-8b --adam fused --steps 15 --warm 7 --json $OUT/e_kept.json > $OUT/e_kept.log 2>&1
echo rc $?; grep -E "median|forward|backward|step  |peak|copy|allocated|loss" $OUT/e_kept.log | head -34; grep -E "Error" $OUT/e_kept.log | head -4 | cut -c1-400
