"""What stands in the way of the set-up, in plain words, and what to do about it."""

import re
import shutil
import sys
import tempfile

DISK = ("no space left", "not enough space", "errno 28", "disk quota exceeded")
RIGHTS = ("read-only file system", "permission denied", "access is denied")
NETWORK = (
    "connection broken",
    "failed to establish a new connection",
    "failed to resolve",
    "name resolution",
    "getaddrinfo failed",
    "network is unreachable",
    "timed out",
    "proxyerror",
    "certificate_verify_failed",
    "(from versions: none)",
)
TORCH = ("no matching distribution found for torch", "constraint) torch")


class Problem(Exception):
    """What the person at the keyboard can mend; the text says what happened and what to do."""


def explain(output, root):
    """Return what happened and what to do, for the output of pip or venv or an OSError's text."""
    low = output.lower()
    for signs, words in ((DISK, _disk), (RIGHTS, _rights), (TORCH, _torch), (NETWORK, _network)):
        if any(sign in low for sign in signs):
            said = words(output, root)
            if said:
                return said
    last = "\n".join("    " + line for line in output.strip().splitlines()[-8:])
    return f"The environment could not be made. The last that was said:\n{last}"


def is_about_torch(output):
    """Say whether pip could not find the torch that was asked for."""
    return any(sign in output.lower() for sign in TORCH)


def lacks(folder, missing, root):
    """Return what to do where the active environment lacks these modules."""
    leave = "conda deactivate" if (folder / "conda-meta").is_dir() else "deactivate"
    return (
        f"The active environment {folder} lacks: {', '.join(missing)}.\n"
        "An active environment is used as it is; nothing is installed into it unasked. Either "
        f"leave it (type {leave}, or open a new terminal) and start this again: the course then "
        f"makes an environment of its own. Or install what is missing into it, in {root}:\n"
        '    python -m pip install -c constraints.txt -e ".[test]"'
    )


def no_module(name):
    """Return what to do where Python lacks the module that makes environments."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return (
        f"This Python has no module {name}, which makes environments. On Debian and Ubuntu:\n"
        f"    sudo apt install python3-venv      (or python{version}-venv, for this Python)\n"
        "Elsewhere, install Python from python.org, or use conda with environment.yml."
    )


def _disk(output, root):
    return (
        f"The disk is full: {shutil.disk_usage(root).free / 1e9:.1f} GB are free in {root} and "
        f"{shutil.disk_usage(tempfile.gettempdir()).free / 1e9:.1f} GB in {tempfile.gettempdir()}, "
        "and the environment needs about 1.5 GB (6 GB with a torch for NVIDIA cards). Make room, "
        "or move the course to a larger disk, and start this again."
    )


def _rights(output, root):
    return (
        f"No environment can be written in {root}. Copy the course into a folder of your own and "
        "start it there; or activate an environment that has the packages."
    )


def _network(output, root):
    return (
        "The packages could not be fetched: no network, or a proxy is in the way (then set "
        "HTTPS_PROXY). Connect and start this again; what was fetched is kept. Once installed, the "
        "course needs no network."
    )


def _torch(output, root):
    """`output` ends with what `pip index versions torch` says, where that was to be had."""
    offered = re.findall(r"(?:from versions: |Available versions: )([^)\n]*)", output)
    versions = [version for line in offered for version in line.split(", ") if _numbers(version)]
    if offered and not versions:
        return None  # not even an old one: that is the network
    python = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
    newest = max(versions, key=_numbers, default="2.6.0")
    if _numbers(newest) < (2, 6):
        return (
            f"No torch from 2.6 on is to be had here for {python}. Use a 64-bit Python 3.10 to "
            "3.13 (delete the folder .venv first), or conda with environment.yml."
        )
    return (
        f"The torch named in constraints.txt is not to be had here for {python}. Write "
        f"torch=={newest} into constraints.txt instead, and start this again."
    )


def _numbers(version):
    """Return (2, 13, 0) for "2.13.0" or "2.13.0+cpu", and () for anything else."""
    match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(\+\w+)?", version)
    return tuple(int(number) for number in match.groups()[:3]) if match else ()
