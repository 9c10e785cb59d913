"""Prints what the course needs of a machine, what is there, and what to do about what is not."""

import os
import re
import socket
import sys
import tempfile
from contextlib import closing

from tools.environment import ROOT

UPDATE = 'python -m pip install -c constraints.txt -e ".[test]"'
PORTS = range(8888, 8893)  # JupyterLab tries these, then others at random


def report():
    """Check everything, inside the environment; return 0, or 1 if something failed."""
    return _print([python(), *torch_lines(), write_access(), free_port()])


def report_without_environment(problem):
    """Check what can be checked without torch; the missing environment is the first failure."""
    return _print([(False, "environment", str(problem)), python(), write_access(), free_port()])


def python():
    version = ".".join(map(str, sys.version_info[:3]))
    note = "" if sys.version_info < (3, 14) else "; tested with 3.10 to 3.13"
    return True, "Python", f"{version} in {sys.prefix}{note}"


def torch_lines():
    """Return the lines on torch, its device and its 16-bit types."""
    try:
        import torch
    except (ImportError, OSError) as error:
        hint = f"Install it again: {UPDATE}"
        if os.name == "nt":
            hint += "; on Windows it also needs the Microsoft Visual C++ Redistributable"
        return [(False, "torch", f"cannot be imported: {error}. {hint}")]
    return [
        torch_version(torch.__version__),
        device(torch),
        *(half_type(torch, name) for name in ("float16", "bfloat16")),
    ]


def torch_version(version):
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < (2, 6):
        return False, "torch", f"{version} is too old, 2.6 or newer is needed: {UPDATE}"
    tested = re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text("utf-8"), re.M)
    if tested in ([], [version.split("+")[0]]):
        return True, "torch", version
    return True, "torch", f"{version} (the stored outputs are from {tested[0]})"


def device(torch):
    if torch.cuda.is_available():
        return True, "device", f"cuda, {torch.cuda.get_device_name(0)}"
    return True, "device", "cpu: enough for the whole series, no GPU is needed"


def half_type(torch, name):
    """Run a layer forward and backward in this 16-bit type, as autocast does."""
    try:
        dtype = getattr(torch, name)
        layer = torch.nn.Linear(4, 4)
        with torch.autocast("cpu", dtype=dtype):
            result = layer(torch.ones(4, 4))
        result.float().sum().backward()
        if result.dtype != dtype:
            return False, name, f"autocast gives {result.dtype} on this torch: {UPDATE}"
    except (AttributeError, RuntimeError) as error:
        return False, name, f"this build of torch lacks it ({error}). Install another: {UPDATE}"
    return True, name, "autocast runs forward and backward"


def write_access():
    try:
        with tempfile.TemporaryFile(dir=ROOT / "notebooks"):
            return True, "write access", "your changes to the notebooks can be saved"
    except OSError:
        said = (
            f"{ROOT / 'notebooks'} cannot be written. Notebooks run, but nothing can be saved: "
            "copy the course into a folder of your own and work there"
        )
        return False, "write access", said


def free_port():
    if _is_free(PORTS[0]):
        return True, "port", f"{PORTS[0]} is free"
    for port in PORTS[1:]:
        if _is_free(port):
            said = f"{PORTS[0]} is taken; JupyterLab takes {port}, see the address it prints"
            return True, "port", said
    said = f"{PORTS[0]} to {PORTS[-1]} are taken: close a JupyterLab, or add --port=9000 to lab"
    return False, "port", said


def _is_free(port):
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as server:
        if os.name == "posix":
            # As Jupyter's server does: a port just left by another one counts as free.
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _print(lines):
    for passed, name, said in lines:
        print(f"{'OK  ' if passed else 'FAIL'}  {name:<13} {said}")
    return 0 if all(passed for passed, _, _ in lines) else 1
