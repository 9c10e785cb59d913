"""Set up, open, test and build the series.

    python3 course.py lab [00] [...]    open JupyterLab at notebook 00; the rest goes to JupyterLab
    python3 course.py test [...]        lint, unit tests, notebooks; the rest goes to pytest
    python3 course.py test --all        also other seeds and the exam's whole bank
    python3 course.py test --browser    also every notebook in JupyterLab in Chromium
    python3 course.py test --gpu        the same on CUDA
    python3 course.py test --noise [N]  notebooks under N (20) seeds of rounding noise
    python3 course.py test --machines   notebooks with other CPUs' kernels and thread counts
    python3 course.py build [00 ...]    run these notebooks, or all, and store their outputs
    python3 course.py check             say what this machine lacks and what to do about it

On Windows write `py` for `python3`. An environment is made in the folder .venv, and kept up to
date with pyproject.toml and constraints.txt, unless a virtual or conda environment is active: that
one is used as it is, and nothing is installed into it. Conda's `base` does not count as active.
"""

# Written so that any Python can read this file: on an old one the reader gets the message below,
# not a SyntaxError.
import sys

if sys.version_info < (3, 10):
    sys.exit(
        "This course needs Python 3.10 or newer; this is Python {0}.{1}. Install a newer one (from "
        "python.org, your package manager, or conda) and start the course with it, for example: "
        "python3.12 course.py lab".format(*sys.version_info[:2])
    )

import os
import signal
import subprocess
from urllib.parse import quote

from tools.environment import ROOT, environment, python_of, same
from tools.problems import Problem

INSIDE = "NAN_LAB_COURSE_INSIDE"  # set for the second start, inside the environment


def lab(arguments):
    """Open JupyterLab at one notebook; return its exit status."""
    from tools import notebooks

    number = arguments.pop(0) if arguments and arguments[0].isdigit() else "00"
    name = notebooks.find(number).name
    command = [sys.executable, "-m", "jupyterlab", "--ServerApp.root_dir=" + str(ROOT)]
    command.append("--LabApp.default_url=/lab/tree/notebooks/" + quote(name))
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    return run(command + arguments)


def test(arguments):
    """Run lint, unit tests and every notebook, compared with its stored outputs; 0 is success."""
    if arguments[:1] in (["--noise"], ["--machines"]):
        from tools import machines

        os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
        if arguments.pop(0) == "--machines":
            return machines.compare_on_cpus(arguments)
        seeds = int(arguments.pop(0)) if arguments and arguments[0].isdigit() else 20
        return machines.compare_under_noise(range(seeds), arguments)
    if arguments[:1] == ["--gpu"]:
        import torch

        arguments = arguments[1:]
        if not torch.cuda.is_available():
            sys.stderr.write("torch {0} sees no CUDA device.\n".format(torch.__version__))
            return 2
        os.environ["NAN_LAB_DEVICE"] = "cuda"
    command = [sys.executable, "-m", "pytest", "--nbval", "-p", "no:randomly"]
    # A notebook's cells need one kernel, in order: they must stay on one worker.
    command += ["-n", str(min(4, max(2, os.cpu_count() or 2))), "--dist", "loadscope"]
    if not any(os.path.exists(word.split("::")[0]) for word in arguments):
        command += ["tests", "notebooks"]
    return run(command + arguments)


def build(arguments):
    """Execute the notebooks with these numbers, or all, and write them in canonical form."""
    from tools import notebooks

    return notebooks.build([notebooks.find(number) for number in arguments] or notebooks.every())


def check(_):
    """Print one OK or FAIL line a requirement; return 1 if one failed."""
    from tools.check import report

    return report()


def run(command):
    """Run a command with nan_lab on its path, and return its exit status."""
    paths = [str(ROOT)] + [path for path in [os.environ.get("PYTHONPATH")] if path]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    # A kernel called python3 in the reader's home belongs to another environment.
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    return become(command)


def become(command):
    """Let the command take this process's place, so that Ctrl-C and signals reach only it."""
    sys.stdout.flush()
    if os.name == "posix":
        os.execv(command[0], command)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return subprocess.call(command)


def main(arguments):
    commands = {"lab": lab, "test": test, "build": build, "check": check}
    if not arguments or arguments[0] not in commands:
        print(__doc__)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    os.chdir(str(ROOT))
    try:
        if os.environ.pop(INSIDE, None) is None:
            folder = environment()
            if not same(folder, sys.prefix):
                os.environ[INSIDE] = "1"
                return become([str(python_of(folder)), str(ROOT / "course.py")] + arguments)
        return commands[arguments[0]](arguments[1:])
    except Problem as problem:
        if arguments[0] == "check":
            from tools.check import report_without_environment

            return report_without_environment(problem)
        sys.stderr.write("{0}\n".format(problem))
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        # A console that cannot show a letter of a path shows "?" for it.
        stream.reconfigure(errors="replace")
    sys.exit(main(sys.argv[1:]))
