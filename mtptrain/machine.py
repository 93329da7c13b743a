"""One line that says what machine a figure was measured on, for reports and benchmarks.

Read from the system, nothing typed by hand. It gives up clock rates and driver versions: they vary
while a run goes on, and two figures are comparable or not by what stands here.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from pathlib import Path

import torch


def describe_machine() -> str:
    """CPU model, cores this process may use, memory, GPUs: `EPYC 9654, 2 cores, 8 GiB, no GPU`."""
    return f"{_cpu_model()}, {_num_cores()} cores, {_memory_gib():.0f} GiB, {_gpus()}"


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine() or "unknown CPU")


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_gib() -> float:
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return 0.0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _gpus() -> str:
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items()) or "no GPU"
