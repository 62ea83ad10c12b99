#!/bin/bash
source /work/wt/ck.env
cd /tmp/ck/ds/tests
run() { label=$1 dc=$2 opts=$3 limit=$4; shift 4
( export PYTHONPATH=/work/wt/ck/build/editable:/tmp/ck/ds/tests DS_ACCELERATOR=cpu DC=$dc DC_OPTIONS="$opts" OMP_NUM_THREADS=1 DS_UNITTEST_TIMEOUT=120 LOCAL_SIZE=4 DC_LOG=/tmp/ck/engines.$label DS_DISABLE_REUSE_DIST_ENV=1 TMPDIR=/tmp/ck/tmp
mkdir -p $TMPDIR; rm -f $DC_LOG
timeout -s INT $limit pytest -q -p no:cacheprovider -n 2 --basetemp=/tmp/ck/tmp/$label -rA --tb=short "$@" > /tmp/ck/log.$label 2>&1 ); }
Z=unit/runtime/zero V=unit/v1/zero C=unit/checkpoint
run A on '{}' 900 $Z/test_zero_tensor_fragment.py $V/test_offload_states.py $V/test_zero2_offload_multi_backward.py $V/test_zero_cpu_offload_grad_accum.py $Z/test_ignore_unused_parameters.py
run B on '{}' 900 $C/test_zero_optimizer.py $C/test_universal_checkpoint.py $C/test_latest_checkpoint.py $C/test_lr_scheduler.py $C/test_other_optimizer.py $C/test_shared_weights.py $C/test_tag_validation.py $C/test_convert_checkpoint.py $C/test_moe_checkpoint.py
find /work/wt/ext_ck -name lock -delete
run2() { label=$1 dc=$2 opts=$3 limit=$4; shift 4
( export PYTHONPATH=/tmp/ck/pp:/tmp/ck/ds/tests DS_ACCELERATOR=cpu DC=$dc DC_OPTIONS="$opts" OMP_NUM_THREADS=1 DS_UNITTEST_TIMEOUT=150 LOCAL_SIZE=4 DC_LOG=/tmp/ck/engines.$label DS_DISABLE_REUSE_DIST_ENV=1 TMPDIR=/tmp/ck/tmp
mkdir -p $TMPDIR; rm -f $DC_LOG
timeout -s INT $limit pytest -q -p no:cacheprovider -n 2 --basetemp=/tmp/ck/tmp/$label -rA --tb=short "$@" > /tmp/ck/log.$label 2>&1 ); }
SAMPLE=4 run2 A2 on '{}' 420 $Z/test_zero_tensor_fragment.py $V/test_offload_states.py $V/test_zero2_offload_multi_backward.py $V/test_zero_cpu_offload_grad_accum.py $Z/test_ignore_unused_parameters.py $C/test_zero_optimizer.py $C/test_latest_checkpoint.py $C/test_lr_scheduler.py $C/test_other_optimizer.py $C/test_shared_weights.py
for m in sharded remainders; do PYTHONPATH=/tmp/ck/pp timeout 60 python /tmp/ck/cyc.py $m > /tmp/ck/log.cyc.$m 2>&1; done
for m in remainders kept; do PYTHONPATH=/tmp/ck/pp2 timeout 60 python /tmp/ck/mem.py $m > /tmp/ck/mem3.$m 2>&1; done
