. .gpu/setup.sh
t0=$(date +%s)
python3 -c "from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module; reducer_module(); print('native built')" 2>&1 | tail -1
echo "built after $(( $(date +%s)-t0 )) s"
left=$(( ${LIMIT:-585} - $(date +%s) + t0 ))
timeout -s INT -k 12 $left python3 -m pytest -v --tb=short $TESTS --gpu --fewer-cases -n ${N:-14} --dist worksteal --base /tmp/base -p no:cacheprovider -o timeout=200 -rfE > $OUT/tests.log 2>&1
echo rc $?; grep -E "^(FAILED|ERROR)" $OUT/tests.log | cut -c1-300 | head -60; tail -3 $OUT/tests.log | cut -c1-300
nvidia-smi --query-gpu=memory.used --format=csv | tail -1
