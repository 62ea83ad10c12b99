# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's engine does differently: it is set up, and calls what is here."""
