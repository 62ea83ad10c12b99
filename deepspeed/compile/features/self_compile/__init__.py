# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Has an engine whose configuration says ``compile.deepcompile`` compile itself."""

# Parts without which this one does not work.
NEEDS = ("features.configuration", "features.unsupported_options")
