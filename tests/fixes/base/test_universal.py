# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is loaded by another number of ranks as DeepSpeed's error says."""

import re
import shlex
import subprocess
import sys

import pytest
from features.checkpoints.test_checkpoints_converted import check_universal, save_for_other_ranks

from support.checkpoints import Run, start
from support.options import outcome


def said_of_another_number_of_ranks(run, folder):
    """Returns the error of an engine that loads a checkpoint of another number of ranks."""
    engine = start(run, seed=1)[1]
    try:
        return outcome(engine.load_checkpoint, folder, tag="saved")
    finally:
        engine.destroy()


@pytest.mark.follows("set checkpoint.load_universal to true,")
def test_the_error_says_what_to_run(ranks, tmp_path):
    """DeepSpeed would say what is not supported, and its command would ask for a flag that no page names."""
    run, folder = Run("FillsPartition", stage=1), str(tmp_path)
    ranks(2).run(save_for_other_ranks, run, folder)
    (said,) = ranks(1).run(said_of_another_number_of_ranks, run, folder)
    command = shlex.split(re.search("run `python (.*?)`", said)[1])
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    assert "checkpoint.load_universal" in said and 'tag="universal"' in said
    ranks(1).run(check_universal, run, folder)
