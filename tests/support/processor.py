# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Makes cpuinfo find out once what this processor is: it starts a program for that, which takes a CPU-second.

DeepSpeed asks cpuinfo whenever it makes an Adam in C++.
"""

import functools

from cpuinfo import cpuinfo

cpuinfo.get_cpu_info_json = functools.cache(cpuinfo.get_cpu_info_json)
