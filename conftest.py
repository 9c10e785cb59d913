"""Makes a bare `pytest --nbval notebooks/` right from any folder."""

import os
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent)

# Two workers with as many threads as cores each take twice the time of two with one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The kernels import nan_lab from here, installed or not, and not from another checkout.
os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
# A warning is an output that has to be seen.
os.environ.pop("PYTHONWARNINGS", None)


def pytest_configure(config):
    # The kernel of this Python, not one that happens to be called python3 in the user's home.
    config.option.nbval_current_env = True
