# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Steps Adam and AdamW in one pass over memory, also with states and master weights in fewer bits.

``compile.optimizer_states`` keeps states in 8 bits. ``compile.store_param_remainders`` keeps master weights as the
parameters and 16 more bits. DeepSpeed's Muon gets its updates of whole matrices here.
"""

# Parts without which this one does not work.
NEEDS = ("features.checkpoints",)
