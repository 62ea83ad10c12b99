# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Keeps those of Liger's kernels out of graphs that compiled code calls wrongly.

To Liger: under ``torch.compile``, ``LigerRMSNorm`` has wrong gradients or reads memory of others, because torch cannot
analyse its Triton kernels and takes every input for changed, and ``LigerFusedLinearCrossEntropy`` is wrong in some
steps (``docs/findings/liger_rms_norm.py``). Please make them custom operators that say what they change.
"""
