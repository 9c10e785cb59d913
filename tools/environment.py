"""Finds, makes and updates the environment that the course runs in (standard library only)."""

import contextlib
import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tools.problems import Problem, explain, is_about_torch, lacks, no_module

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "course-installed.txt"
LOG = VENV / "course-install.log"
LOCK = ROOT / ".course" / "lock"
MAKE = ["-m", "venv"]
IS_USABLE = "import sys, pip; sys.exit(sys.version_info < (3, 10))"
INSTALL = ["-m", "pip", "install", "-c", "constraints.txt", "-e", ".[test]"]
NEEDED = (
    "torch numpy matplotlib PIL jupyterlab ipykernel IPython nbclient nbformat nbval"
    " pytest xdist ruff"
)


def environment():
    """Return the folder of the environment to use; make or update .venv where none is active.

    Raises Problem when it cannot be made, or when the active one lacks packages.
    """
    active = active_environment()
    if active is not None and not same(active, VENV):
        missing = missing_in(active)
        if missing:
            raise Problem(lacks(active, missing, ROOT))
        return active
    try:
        if not is_up_to_date():
            with only_one():
                if not is_up_to_date():  # another course.py may just have done it
                    if not works(VENV):
                        make_venv()
                    install()
    except OSError as error:
        raise Problem(explain(str(error), ROOT)) from None
    return VENV


@contextlib.contextmanager
def only_one():
    """Wait until no other course.py is at work on .venv. The system frees the lock at any exit."""
    LOCK.parent.mkdir(exist_ok=True)
    with open(LOCK, "w") as file:
        said = False
        while not _take(file):
            if not said:
                print("Another course.py is setting up the environment: waiting for it", flush=True)
            said = True
            time.sleep(0.5)
        yield


def _take(file):
    """Lock an open file; say whether it is this process's now."""
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Anything else than "taken" is a disk without locks (some network drives): go on.
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK)
    return True


def is_up_to_date():
    """Say whether .venv works and holds what pyproject.toml and constraints.txt ask for."""
    return STAMP.is_file() and STAMP.read_text("utf-8") == fingerprint() and works(VENV)


def active_environment():
    """Return the folder of the active virtual or conda environment, or None."""
    if sys.prefix != sys.base_prefix:
        return Path(sys.prefix)
    for folder in (os.environ.get("VIRTUAL_ENV"), os.environ.get("CONDA_PREFIX"), sys.prefix):
        if folder is None or not python_of(Path(folder)).exists():
            continue
        is_virtual = (Path(folder) / "pyvenv.cfg").is_file()
        # Only conda's base, which many people have on all the time, has the folder pkgs.
        is_conda = (Path(folder) / "conda-meta").is_dir() and not (Path(folder) / "pkgs").is_dir()
        if is_virtual or is_conda:
            return Path(folder)
    return None


def python_of(folder):
    """Return the path of the environment's Python, there or not."""
    if os.name != "nt":
        return folder / "bin" / "python"
    conda = folder / "python.exe"
    return conda if conda.exists() else folder / "Scripts" / "python.exe"


def same(one, other):
    """Say whether two paths are one existing folder."""
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)


def works(folder):
    """Say whether the environment's Python starts, is new enough and has a pip."""
    return _ends_well(python_of(folder), "-c", IS_USABLE)


def _ends_well(*command):
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def missing_in(folder):
    """Return the modules that the course imports and this environment lacks."""
    code = f"""import importlib.util as u
print(*[name for name in {NEEDED.split()} if u.find_spec(name) is None])"""
    result = subprocess.run([str(python_of(folder)), "-c", code], capture_output=True, text=True)
    return result.stdout.split()


def fingerprint():
    """Return a hash of what an install depends on: two files, and the folder, which may move."""
    parts = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    return hashlib.sha256(b"\n".join([*parts, os.fsencode(ROOT)])).hexdigest()


def make_venv():
    """Make .venv from nothing, or mend or replace one that does not work."""
    python = python_of(VENV)
    # Some tools make environments without pip.
    if python.exists() and _ends_well(python, "-m", "ensurepip") and works(VENV):
        return
    if same(VENV, sys.prefix):
        raise Problem(f"The environment {VENV} has no pip. Type deactivate and delete that folder.")
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            raise Problem(no_module(module))
    if VENV.is_symlink():
        VENV.unlink()
    elif VENV.exists():
        print("The environment in .venv does not work. It is made again.", flush=True)
        shutil.rmtree(VENV)
    print(f"Making an environment in {VENV} (once)", flush=True)
    command = [sys.executable, *MAKE, str(VENV)]
    made = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if made.returncode or not works(VENV):
        raise Problem(explain(made.stdout + made.stderr, ROOT))


def install():
    """Install the course and what it needs into .venv; the whole of pip's words goes to a log."""
    print("Installing PyTorch, JupyterLab and the tests' tools: some minutes, once", flush=True)
    command = [str(python_of(VENV)), *INSTALL, "--progress-bar", "off", "--no-color"]
    words = dict(os.environ, PYTHONUTF8="1", PYTHONUNBUFFERED="1")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with (
        open(LOG, "w", encoding="utf-8") as log,
        subprocess.Popen(command, cwd=ROOT, env=words, **pipes) as pip,
    ):
        for line in pip.stdout:
            text = line.decode("utf-8", "replace")
            log.write(text)
            if text.split()[:1] == ["Downloading"] and (" MB" in text or " GB" in text):
                print("  " + text.strip(), flush=True)
            elif text.startswith("Installing collected packages"):
                print("  Unpacking", flush=True)
    if pip.returncode:
        output = LOG.read_text("utf-8")
        if is_about_torch(output):
            output += _torch_versions()
        raise Problem(f"{explain(output, ROOT)}\nAll that pip said: {LOG}")
    STAMP.write_text(fingerprint(), "utf-8")


def _torch_versions():
    """Return pip's list of the versions of torch for this machine, or what it says instead."""
    command = [str(python_of(VENV)), "-m", "pip", "index", "versions", "torch"]
    return subprocess.run(command, capture_output=True, text=True, errors="replace").stdout
