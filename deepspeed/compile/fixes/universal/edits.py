# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``setup.py`` changes in DeepSpeed: (file, name of the edit, anchor, replacement)."""

EDITS = (
    # With model parallelism the state says how parts of parameters belong together.
    (
        "deepspeed/checkpoint/ds_to_universal.py",
        "state that need not be in a checkpoint",
        "        if args.inject_missing_state:\n            _inject_missing_state(ds_checkpoint)\n"
        "        _check_for_required_state(ds_checkpoint)\n\n        iteration",
        "        if args.inject_missing_state or ds_checkpoint.tp_degree * ds_checkpoint.pp_degree == 1:\n"
        "            _inject_missing_state(ds_checkpoint)\n"
        "        _check_for_required_state(ds_checkpoint)\n\n        iteration",
    ),
    # Only the text changes: it says what to do.
    (
        "deepspeed/runtime/engine.py",
        "refusal of another number of ranks",
        '                    "of ZeRO\'s optimizer state partitioning with a new world size is not " \\\n'
        '                    "currently supported.")\n',
        '                    "of ZeRO\'s optimizer state partitioning with a new world size is not " \\\n'
        '                    "currently supported; run `python -m deepspeed.checkpoint.ds_to_universal "\n'
        '                    f"--input_folder {os.path.join(load_dir, tag)} --output_folder "\n'
        "                    f\"{os.path.join(load_dir, 'universal')}`, set checkpoint.load_universal to true, \"\n"
        "                    'and load with tag=\"universal\"')\n",
    ),
)
