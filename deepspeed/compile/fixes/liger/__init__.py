# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Keeps Liger's kernels out of graphs if compiled code would call them wrongly.

To Liger: under ``torch.compile``, ``LigerRMSNorm`` has wrong gradients or reads foreign memory, because torch cannot
analyse its Triton kernels and takes every input for changed, and ``LigerFusedLinearCrossEntropy`` is wrong in some
steps (``docs/findings/liger_rms_norm.py``). Please make them custom operators that declare their mutations.
"""
