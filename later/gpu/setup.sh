# installs the fork, the base and packages; sourced in the repo's root on the GPU machine
export NCCL_NVLS_ENABLE=0 TORCH_CUDA_ARCH_LIST=9.0 PYTHONSAFEPATH=1 TORCH_EXTENSIONS_DIR=/tmp/ext HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
if [ ! -d /tmp/fork ]; then
python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/fork .gpu/deps/*.whl .gpu/fork/*.whl
python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/base .gpu/deps/*.whl .gpu/base/*.whl
fi
export PYTHONPATH=/tmp/fork
