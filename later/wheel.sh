#!/bin/bash
# builds the wheel of a worktree's HEAD into /work/main/.gpu
set -e
cd /work/wt/$1
rm -rf /work/main/.gpu/t_engines /work/main/.gpu/w_engines; mkdir -p /work/main/.gpu/t_engines /work/main/.gpu/w_engines
git archive HEAD | tar -x -C /work/main/.gpu/t_engines
rm -rf /tmp/bw_engines; mkdir /tmp/bw_engines; git archive HEAD | tar -x -C /tmp/bw_engines
mkdir -p /tmp/bw_engines/build; ln -sfn /work/main/build/archive /tmp/bw_engines/build/archive
cd /tmp/bw_engines; env -u PYTHONPATH /work/main/.venv/torch-2.13.0/bin/pip wheel -q --no-deps --no-build-isolation -w /work/main/.gpu/w_engines . 2>&1 | tail -3
ls -la /work/main/.gpu/w_engines; du -sh /work/main/.gpu
