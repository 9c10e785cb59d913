"""Compare the notebooks' stored outputs under other arithmetic: noise, or another CPU's kernels."""

import os
import subprocess
import sys
import tempfile

from tools.noise import write_ipython_profile
from tools.notebooks import ROOT

# How torch's libraries choose kernels: ATen, oneDNN, MKL, and the number of threads.
CPUS = [
    {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    {"OMP_NUM_THREADS": "2"},
]


def compare_under_noise(seeds, arguments):
    """Run the notebooks under `tools.noise.UlpNoise` once for each seed; return the exit status."""
    failed = 0
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            write_ipython_profile(folder, seed)
            failed |= _compare(f"noise seed {seed}", {"IPYTHONDIR": folder}, arguments)
    return failed


def compare_on_cpus(arguments):
    """Run the notebooks once with each of the CPU settings; return the exit status."""
    failed = 0
    for settings in CPUS:
        title = " ".join(f"{name}={value}" for name, value in settings.items())
        failed |= _compare(title, settings, arguments)
    return failed


def _compare(title, settings, arguments):
    print(f"== {title}", flush=True)
    command = [sys.executable, "-m", "pytest", "--nbval", "-q", "-p", "no:randomly"]
    command += ["-n", "2", "--dist", "loadscope", *(arguments or ["notebooks"])]
    return subprocess.call(command, cwd=ROOT, env={**os.environ, **settings})
