#!/bin/bash
# dst.sh LABEL DC OPTIONS files...
source /work/wt/ck.env
label=$1 dc=$2 opts=$3; shift 3
cd /tmp/ck/ds/tests
export PYTHONPATH=/work/wt/ck/build/editable:/tmp/ck/ds/tests DS_ACCELERATOR=cpu DC=$dc DC_OPTIONS="$opts" OMP_NUM_THREADS=1 DS_UNITTEST_TIMEOUT=150 LOCAL_SIZE=4 DC_LOG=/tmp/ck/engines.$label DS_DISABLE_REUSE_DIST_ENV=1
export TMPDIR=/tmp/ck/tmp; mkdir -p $TMPDIR
rm -f $DC_LOG
exec /work/wt/t pytest -q -x --maxfail=100000 -p no:cacheprovider -p no:xdist -s --basetemp=/tmp/ck/tmp/$label -rA --tb=short "$@" > /tmp/ck/log.$label 2>&1
