"""Keeps a stranger's loop from harming its caller: global state, output, and time."""

import contextlib
import ctypes
import random
import threading
import time
import warnings

import numpy as np
import torch

PATIENCE = 10  # seconds without a batch drawn or a loss yielded; a step takes milliseconds


class TimeUp(BaseException):
    """Ends a loop that does not end. No Exception, so that `except Exception` lets it by."""


class Clock(threading.Thread):
    """Raises TimeUp in the caller's thread when the loop has been silent for PATIENCE seconds.

    An asynchronous exception arrives between two bytecodes, on every system and without signals;
    it cannot interrupt one long call into C. It is raised again until the loop gives in.
    """

    def __init__(self):
        super().__init__(daemon=True)
        self.target = ctypes.c_ulong(threading.get_ident())
        self.lock, self.over, self.fired = threading.Lock(), threading.Event(), False
        self.tick()

    def tick(self):
        self.last = time.monotonic()

    def run(self):
        while not self.over.wait(0.05):
            with self.lock:
                if not self.over.is_set() and time.monotonic() - self.last > PATIENCE:
                    self.fired = True
                    _raise_in(self.target, ctypes.py_object(TimeUp))

    def stop(self):
        with self.lock:
            self.over.set()
            _raise_in(self.target, None)  # one that has not arrived yet is withdrawn


def _raise_in(thread, exception):
    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, exception)


# Name, how to read it, how to set it. The loop has its own values of these, also across a yield.
STATE = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the default device": (lambda: str(torch.get_default_device()), torch.set_default_device),
    "the grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "the anomaly mode": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "autocast": (
        lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        lambda on: (
            torch.set_autocast_enabled("cpu", on[0]),
            torch.set_autocast_dtype("cpu", on[1]),
        ),
    ),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
}


def read_state():
    return {name: read() for name, (read, _) in STATE.items()}


def write_state(state):
    for name, (read, write) in STATE.items():
        if read() != state[name]:
            write(state[name])


class _Nowhere:
    """A file that forgets what is printed to it."""

    def write(self, text):
        return len(text)

    def flush(self):
        pass

    def isatty(self):
        return False


def _set_autocast_depth(depth):
    """Set how many autocast blocks torch counts around this line; return how many it was.

    Only at 0 does autocast drop its half copies of the weights, which are stale after a step.
    """
    found = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    for _ in range(abs(depth - found)):
        (torch.autocast_decrement_nesting if found > depth else torch.autocast_increment_nesting)()
    return found


@contextlib.contextmanager
def contained():
    """Give the block the ordinary global state; afterwards everything is as it was."""
    outside, python, numpy = read_state(), random.getstate(), np.random.get_state()
    depth = _set_autocast_depth(0)
    with (
        warnings.catch_warnings(record=True),
        torch.random.fork_rng([]),
        contextlib.redirect_stdout(_Nowhere()),
        contextlib.redirect_stderr(_Nowhere()),
    ):
        try:
            ordinary = {"the default dtype": torch.float32, "the default device": "cpu"}
            ordinary |= {"the grad mode": True, "autocast": (False, torch.bfloat16)}
            write_state({**outside, **ordinary, "the anomaly mode": False})
            yield
        finally:
            write_state(outside)
            torch.clear_autocast_cache()
            _set_autocast_depth(depth)
            random.setstate(python)
            np.random.set_state(numpy)
