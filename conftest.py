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


def pytest_addoption(parser):
    parser.addoption(
        "--all",
        action="store_true",
        help="also the other seeds and the whole bank of the exam",
    )
    parser.addoption("--browser", action="store_true", help="also JupyterLab in Chromium")


def pytest_collection_modifyitems(config, items):
    every, browser = config.getoption("--all"), config.getoption("--browser")
    slow = [
        item
        for item in items
        if (_is_slow(item) and not every)
        or (item.get_closest_marker("browser") is not None and not browser)
    ]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in set(slow)]


def _is_slow(item):
    """Marked as slow, or a repetition of a test with another seed."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return item.get_closest_marker("slow") is not None or parameters.get("seed", 0) != 0


def pytest_configure(config):
    # The kernel of this Python, not one that happens to be called python3 in the user's home.
    config.option.nbval_current_env = True
