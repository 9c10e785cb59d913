"""pyproject.toml, environment.yml and constraints.txt say the same, and all that is imported."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tools import environment, notebooks

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings the same parser
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
CONDA_NAME = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
IMPORTED_AS = {"PIL": "pillow", "IPython": "ipython", "xdist": "pytest-xdist"}


def bounds(requirements):
    """{"torch": ">=2.6"} for ["torch>=2.6"] or ["torch >=2.6"]."""
    pairs = (re.fullmatch(r"([\w-]+) ?(.*)", requirement) for requirement in requirements)
    return {match[1]: match[2] for match in pairs}


def declared():
    extras = PROJECT["optional-dependencies"]
    return bounds(PROJECT["dependencies"]), bounds(extras["test"])


def conda():
    """The lists of environment.yml, read by hand: two levels of "- item", nothing else."""
    lists, name = {}, None
    for line in (ROOT / "environment.yml").read_text("utf-8").splitlines():
        if re.fullmatch(r"\w+:", line):
            name = line[:-1]
            lists[name] = []
        elif line.startswith("  - "):
            lists[name].append(line[4:])
        else:
            assert line.startswith(("#", "name: ")), line
    return lists


def test_environment_yml_and_pyproject_ask_for_the_same():
    core, test = declared()
    expected = {CONDA_NAME.get(name, name): bound for name, bound in {**core, **test}.items()}
    expected["python"] = PROJECT["requires-python"]
    assert bounds(conda()["dependencies"]) == expected


def test_conda_takes_packages_from_conda_forge_only():
    assert conda()["channels"] == ["conda-forge", "nodefaults"]


def test_only_lower_bounds():
    core, test = declared()
    for name, bound in {**core, **test}.items():
        assert re.fullmatch(r">=\d+(\.\d+)*", bound), f"{name}{bound}"


def test_constraints_name_one_torch_that_pyproject_allows():
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    core, test = declared()
    assert set(pins) <= {*core, *test}
    # The workflow against the newest torch takes the line out.
    torch = pins.get("torch", "2.6" if os.environ.get("GITHUB_ACTIONS") else "0")
    assert tuple(map(int, torch.split("."))) >= (2, 6)


def imported(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.split(".")[0]


def imports_of(*patterns):
    """The packages imported by these files that are neither Python's own nor the project's."""
    sources = [path.read_text("utf-8") for pattern in patterns for path in ROOT.glob(pattern)]
    names = {name for source in sources for name in imported(source)}
    own = {path.stem for path in [*ROOT.glob("*"), *ROOT.glob("tests/*")]}
    return {IMPORTED_AS.get(name, name) for name in names - own - set(sys.stdlib_module_names)}


def test_all_that_the_course_imports_is_declared():
    core, test = declared()
    assert imports_of("nan_lab/**/*.py", "tools/*.py", "course.py") <= set(core)
    assert imports_of("tests/*.py", "conftest.py") - {"tomli"} <= {*core, *test}


OURS = {"nan_lab", "benchmarks"}  # notebook 08 runs some of the benchmark's cases


def test_all_that_the_notebooks_import_is_declared():
    core, _ = declared()
    for path in notebooks.every():
        cells = nbformat.read(path, as_version=4).cells
        source = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
        names = {IMPORTED_AS.get(name, name) for name in imported(source)}
        assert names - set(sys.stdlib_module_names) - OURS <= set(core), path.name


def test_an_active_environment_is_searched_for_all_that_is_declared():
    """expecttest apart: it is for one test only, and that test says so itself."""
    core, test = declared()
    needed = {IMPORTED_AS.get(name, name) for name in environment.NEEDED.split()}
    assert needed == {*core, *test} - {"expecttest"}


def test_files_before_the_environment_is_there_import_only_python_itself():
    files = ("course.py", "tools/environment.py", "tools/problems.py")
    top_level = [
        node
        for name in files
        for node in ast.parse((ROOT / name).read_text("utf-8")).body
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    names = {name for node in top_level for name in imported(ast.unparse(node))}
    assert names <= {*sys.stdlib_module_names, "tools"}


def test_the_data_travel_with_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["nan_lab"]
    found = {path.name for pattern in patterns for path in (ROOT / "nan_lab").glob(pattern)}
    assert "digits.csv.gz" in found


def test_licences_name_what_they_cover():
    text = (ROOT / "LICENSE-TEXT").read_text("utf-8")
    assert "creativecommons.org/licenses/by/4.0" in text and "10.24432/C50P49" in text
    assert (ROOT / "LICENSE").read_text("utf-8").startswith("MIT License")


def test_ci_runs_the_command_of_the_course():
    last = (ROOT / ".ci" / "run").read_text("utf-8").splitlines()[-1]
    assert last == "python3 course.py test --all"


@pytest.mark.parametrize("arguments", [["check"], ["format", "--check"]], ids=" ".join)
def test_style(arguments):
    """The code and the notebooks' cells; `ruff format .` mends most of what this finds."""
    command = [sys.executable, "-m", "ruff", *arguments, "."]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
