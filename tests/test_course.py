"""course.py and what it says to people whose machine lacks something."""

import ast
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import course
from tools import check, environment, machines, notebooks, problems
from tools.problems import Problem, explain

ROOT = Path(__file__).resolve().parent.parent


def started(*arguments, python=sys.executable, **variables):
    """Run course.py as a reader does; variables with the value None are taken away."""
    names = {**os.environ, **variables}
    return subprocess.run(
        [str(python), str(ROOT / "course.py"), *arguments],
        env={name: value for name, value in names.items() if value is not None},
        capture_output=True,
        text=True,
    )


# ------------------------------------------------------------------ old Pythons


def test_an_old_python_is_told_so():
    """The real check at the top of the file, under a version that this Python only pretends."""
    code = (
        "import sys, runpy; sys.version_info = (3, 8, 18); "
        f"runpy.run_path({str(ROOT / 'course.py')!r})"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert "needs Python 3.10 or newer; this is Python 3.8" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_old_python_can_read_course_py():
    """No syntax newer than Python 3.4, and nothing imported before the check of the version."""
    tree = ast.parse((ROOT / "course.py").read_text("utf-8"), feature_version=(3, 4))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.AnnAssign)]
    body = [type(node).__name__ for node in tree.body[:4]]
    assert body == ["Expr", "Import", "If", "Import"]
    assert [alias.name for alias in tree.body[1].names] == ["sys"]


# ------------------------------------------------------------------ which environment


@pytest.fixture
def no_environment(monkeypatch):
    """Pretend that course.py was started by a Python outside any environment."""
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.delenv("CONDA_PREFIX", raising=False)


def fake_environment(folder, *marks):
    python = environment.python_of(folder)
    python.parent.mkdir(parents=True)
    python.touch()
    for mark in marks:
        (folder / mark).mkdir()
    return folder


def test_no_environment_is_active(no_environment):
    assert environment.active_environment() is None


def test_the_environment_of_the_running_python_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert environment.active_environment() == tmp_path


def test_an_activated_environment_counts_whatever_python_runs(
    no_environment, monkeypatch, tmp_path
):
    folder = fake_environment(tmp_path / "venv")
    (folder / "pyvenv.cfg").touch()
    monkeypatch.setenv("VIRTUAL_ENV", str(folder))
    assert environment.active_environment() == folder


def test_a_deleted_environment_does_not_count(no_environment, monkeypatch, tmp_path):
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "gone"))
    assert environment.active_environment() is None


def test_a_conda_environment_counts_and_base_does_not(no_environment, monkeypatch, tmp_path):
    own = fake_environment(tmp_path / "own", "conda-meta")
    base = fake_environment(tmp_path / "base", "conda-meta", "pkgs")
    monkeypatch.setenv("CONDA_PREFIX", str(own))
    assert environment.active_environment() == own
    monkeypatch.setenv("CONDA_PREFIX", str(base))
    assert environment.active_environment() is None


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """An environment of another project, without any of the packages."""
    folder = tmp_path_factory.mktemp("other") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder


@pytest.mark.parametrize("command", ["lab", "test", "build"])
def test_an_active_environment_without_the_packages_is_left_as_it_is(foreign, command):
    before = sorted(foreign.rglob("*"))
    result = started(command, python=environment.python_of(foreign))
    assert result.returncode == 1
    assert f"The active environment {foreign} lacks: torch, " in result.stderr
    assert "type deactivate" in result.stderr
    assert 'python -m pip install -c constraints.txt -e ".[test]"' in result.stderr
    assert "Traceback" not in result.stderr
    assert sorted(foreign.rglob("*")) == before


def test_check_in_such_an_environment_says_fail(foreign):
    result = started("check", python=environment.python_of(foreign))
    assert result.returncode == 1
    first, *others = [line for line in result.stdout.splitlines() if line[:4] in ("OK  ", "FAIL")]
    assert first.startswith("FAIL  environment") and "lacks: torch" in first
    assert [line.split()[1] for line in others] == ["Python", "write", "port"]


# ------------------------------------------------------------------ making the environment


@pytest.fixture
def folder(no_environment, monkeypatch, tmp_path):
    """The course's environment in a new folder with a space and an umlaut; records installs."""
    root = tmp_path / "mein Künstler"
    root.mkdir()
    for name in ("pyproject.toml", "constraints.txt"):
        (root / name).write_bytes((ROOT / name).read_bytes())
    venv = root / ".venv"
    for name, value in {
        "ROOT": root,
        "VENV": venv,
        "STAMP": venv / "course-installed.txt",
        "LOCK": root / ".course" / "lock",
        "LOG": venv / "course-install.log",
        # Without pip an environment is made in 0.1 s, with it in 4 s.
        "MAKE": ["-m", "venv", "--without-pip"],
        "IS_USABLE": "import sys",
        # Stands in for pip's command, which would take minutes: one letter a call.
        "INSTALL": ["-c", "open('installed', 'a').write('x')"],
    }.items():
        monkeypatch.setattr(environment, name, value)
    return root


def installs(folder):
    return len((folder / "installed").read_text())


def test_it_is_made_once_and_again_only_when_a_file_changed(folder):
    assert environment.environment() == folder / ".venv"
    assert environment.works(folder / ".venv") and installs(folder) == 1
    environment.environment()
    assert installs(folder) == 1
    for name in ("constraints.txt", "pyproject.toml"):
        (folder / name).write_text((folder / name).read_text("utf-8") + "\n# new", "utf-8")
        environment.environment()
    assert installs(folder) == 3


def test_the_courses_own_environment_is_updated_also_when_active(folder, monkeypatch):
    environment.environment()
    monkeypatch.setenv("VIRTUAL_ENV", str(folder / ".venv"))
    (folder / "constraints.txt").write_text("torch==2.9.0\n")
    environment.environment()
    assert installs(folder) == 2


def test_a_half_made_one_is_made_again(folder, capsys):
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "python").symlink_to("/nowhere")
    environment.environment()
    assert environment.works(folder / ".venv") and installs(folder) == 1
    assert "does not work. It is made again" in capsys.readouterr().out


def test_one_without_pip_does_not_work(foreign, tmp_path):
    """As Debian's Python leaves it where python3-venv is missing."""
    assert not environment.works(foreign) and not environment.works(tmp_path)


def test_one_whose_install_was_interrupted_keeps_what_is_there(folder):
    """pip goes on where it stopped; a working environment is never thrown away."""
    environment.environment()
    environment.STAMP.unlink()
    (folder / ".venv" / "kept").touch()
    environment.environment()
    assert (folder / ".venv" / "kept").exists() and installs(folder) == 2


def test_one_made_without_pip_gets_one(folder, monkeypatch):
    """As uv makes them. A file stands in for pip, which takes ensurepip 4 s to write."""
    environment.environment()
    (folder / ".venv" / "kept").touch()
    pip = folder / "pip"
    real = environment._ends_well

    def ends_well(python, *arguments):
        if arguments == ("-m", "ensurepip"):
            pip.touch()
        return real(python, "-c", f"import sys; sys.exit(not {pip.exists()})")

    monkeypatch.setattr(environment, "_ends_well", ends_well)
    environment.environment()
    assert (folder / ".venv" / "kept").exists() and pip.exists() and installs(folder) == 2


def test_the_one_that_is_running_is_never_deleted(folder, monkeypatch):
    environment.environment()
    monkeypatch.setattr(sys, "prefix", str(folder / ".venv"))
    monkeypatch.setattr(environment, "IS_USABLE", "import sys; sys.exit(1)")
    monkeypatch.setattr(environment, "_ends_well", lambda *command: False)
    with pytest.raises(Problem, match="Type deactivate and delete that folder"):
        environment.environment()
    assert environment.python_of(folder / ".venv").exists()


def test_two_at_once_install_once(folder, monkeypatch, capsys):
    """The second waits for the first, then finds the work done."""
    slow = "import time; open('started', 'w'); time.sleep(1); open('installed', 'a').write('x')"
    monkeypatch.setattr(environment, "INSTALL", ["-c", slow])
    first = threading.Thread(target=environment.environment)
    first.start()
    while not (folder / "started").exists():
        time.sleep(0.05)
    environment.environment()
    first.join()
    assert installs(folder) == 1
    assert "Another course.py is setting up" in capsys.readouterr().out


def test_a_failed_install_is_explained_and_tried_again(folder, monkeypatch):
    code = "import sys; print('OSError: [Errno 28] No space left on device'); sys.exit(1)"
    good = environment.INSTALL
    monkeypatch.setattr(environment, "INSTALL", ["-c", code])
    with pytest.raises(Problem, match="The disk is full"):
        environment.environment()
    monkeypatch.setattr(environment, "INSTALL", good)
    environment.environment()
    assert installs(folder) == 1


def test_a_torch_that_is_not_there_is_named_with_one_that_is(folder, monkeypatch):
    code = "import sys; print('The user requested (constraint) torch==2.99.0'); sys.exit(1)"
    monkeypatch.setattr(environment, "INSTALL", ["-c", code])
    monkeypatch.setattr(environment, "_torch_versions", lambda: "Available versions: 2.8.1, 2.7.0")
    with pytest.raises(Problem, match="Write torch==2.8.1 into constraints.txt"):
        environment.environment()


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_a_python_without_venv_is_told_the_debian_package(folder, monkeypatch, module):
    real = environment.importlib.util.find_spec
    monkeypatch.setattr(
        environment.importlib.util, "find_spec", lambda name: None if name == module else real(name)
    )
    with pytest.raises(Problem, match=f"no module {module}.*\n.*apt install python3-venv"):
        environment.environment()
    assert not (folder / ".venv").exists()


def test_a_folder_that_cannot_be_written(folder, monkeypatch):
    def refuse():
        raise OSError(30, "Read-only file system", str(folder / ".venv"))

    monkeypatch.setattr(environment, "make_venv", refuse)
    with pytest.raises(Problem, match="Copy the course into a folder of your own"):
        environment.environment()


# ------------------------------------------------------------------ what pip said


NO_NETWORK = """WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by
'NewConnectionError: Failed to establish a new connection: [Errno -3] Temporary failure in name
resolution': /simple/setuptools/
ERROR: Could not find a version that satisfies the requirement torch>=2.6 (from versions: none)
ERROR: No matching distribution found for torch>=2.6"""
OTHER_TORCH = """ERROR: Could not find a version that satisfies the requirement torch>=2.6 (from
nan-lab[test]) (from versions: 1.13.1, 2.2.2, {})
ERROR: No matching distribution found for torch>=2.6"""


CONFLICT = """The conflict is caused by:
    nan-lab[test] 0.1.0 depends on torch>=2.6
    The user requested (constraint) torch==2.99.0
ERROR: ResolutionImpossible: for help visit
"""


@pytest.mark.parametrize(
    "output, expected",
    [
        (NO_NETWORK, "no network"),
        ("SSLError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify')", "HTTPS_PROXY"),
        ("ERROR: [Errno 28] No space left on device", "The disk is full"),
        ("[Errno 122] Disk quota exceeded: 'torch/lib'", "The disk is full"),
        ("OSError: [Errno 13] Permission denied: '.venv'", "a folder of your own"),
        ("PermissionError: [WinError 5] Access is denied: '.venv'", "a folder of your own"),
        (OTHER_TORCH.format("2.7.0, 2.8.0+cpu"), "Write torch==2.8.0+cpu into constraints.txt"),
        (OTHER_TORCH.format("2.7.0, 2.9.0rc1"), "Write torch==2.7.0 into constraints.txt"),
        (OTHER_TORCH.format("2.5.1"), "No torch from 2.6 on is to be had"),
        (CONFLICT + "torch (2.9.1)\nAvailable versions: 2.10.0, 2.9.1", "Write torch==2.10.0"),
        (CONFLICT, "Write torch==2.6.0"),
        ("a\nerror: metadata-generation-failed", "The last that was said:\n    a\n    error: "),
    ],
)
def test_what_went_wrong_is_said_plainly(output, expected):
    assert expected in explain(output, ROOT)


# ------------------------------------------------------------------ check


def test_check_prints_a_line_for_each_requirement(capsys):
    assert check.report() == 0
    lines = capsys.readouterr().out.splitlines()
    names = ["Python", "torch", "device", "float16", "bfloat16", "write access", "port"]
    assert [line[6:].split("  ")[0] for line in lines] == names
    assert all(line.startswith("OK ") for line in lines)


def test_check_of_an_old_torch():
    passed, _, said = check.torch_version("2.5.1+cu124")
    assert not passed and "2.6 or newer is needed: python -m pip install" in said


def test_check_of_another_torch_than_the_tested_one():
    passed, _, said = check.torch_version("2.10.0")
    assert passed and "the stored outputs are from 2." in said


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_check_of_a_torch_without_a_type(name):
    import torch

    class Layer:
        def __init__(self, *sizes):
            pass

        def __call__(self, x):
            raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'")

    lacking = SimpleNamespace(
        **{name: getattr(torch, name)},
        nn=SimpleNamespace(Linear=Layer),
        ones=torch.ones,
        autocast=torch.autocast,
    )
    passed, label, said = check.half_type(lacking, name)
    assert not passed and label == name and "this build of torch lacks it" in said
    passed, _, said = check.half_type(SimpleNamespace(), name)
    assert not passed and "Install another" in said


def test_check_of_a_read_only_course(monkeypatch, tmp_path):
    monkeypatch.setattr(check, "ROOT", tmp_path)  # without notebooks/: nothing can be written there
    passed, _, said = check.write_access()
    assert not passed and "copy the course into a folder of your own" in said


def taken_ports(count):
    """`count` consecutive ports, of which all but the last are taken, and their servers."""
    servers = []
    while len(servers) < count:
        server = socket.socket()
        start = servers[0].getsockname()[1] + len(servers) if servers else 0
        try:
            server.bind(("127.0.0.1", start))
            server.listen()
            servers.append(server)
        except OSError:
            server.close()
            for other in servers:
                other.close()
            servers = []
    return servers


def test_check_of_a_taken_port(monkeypatch):
    first, second = taken_ports(2)
    port = first.getsockname()[1]
    monkeypatch.setattr(check, "PORTS", range(port, port + 2))
    with first, second:
        passed, _, said = check.free_port()
        assert not passed and "add --port=9000 to lab" in said
        second.close()
        passed, _, said = check.free_port()
        assert passed and said.startswith(f"{port} is taken; JupyterLab takes {port + 1}")


# ------------------------------------------------------------------ the subcommands


@pytest.fixture
def commands(monkeypatch):
    """Collects the commands that would take course.py's place."""
    collected = []
    monkeypatch.setattr(course, "become", lambda command: collected.append(command) or 0)
    monkeypatch.setattr(course, "environment", lambda: Path(sys.prefix))
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    monkeypatch.delenv("JUPYTER_PREFER_ENV_PATH", raising=False)
    monkeypatch.chdir(ROOT)
    return collected


@pytest.fixture
def series(monkeypatch, tmp_path):
    for name in ("00_the_start.ipynb", "01_lög.ipynb"):
        (tmp_path / name).touch()
    monkeypatch.setattr(notebooks, "NOTEBOOKS", tmp_path)


def test_lab_opens_the_notebook_and_passes_arguments_on(commands, series, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000, raising=False)
    url = "--LabApp.default_url=/lab/tree/notebooks/"
    assert course.main(["lab"]) == 0
    assert (
        commands[-1][1:3] == ["-m", "jupyterlab"] and commands[-1][-1] == url + "00_the_start.ipynb"
    )
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "elsewhere"]
    course.main(["lab", "01", "--no-browser", "--port=9000"])
    assert commands[-1][-3:] == [url + "01_l%C3%B6g.ipynb", "--no-browser", "--port=9000"]
    course.main(["lab", "--no-browser"])
    assert commands[-1][-2:] == [url + "00_the_start.ipynb", "--no-browser"]


def test_lab_as_root_allows_root(commands, series, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0, raising=False)
    course.main(["lab", "00"])
    assert "--allow-root" in commands[-1]


def test_lab_of_a_notebook_that_is_not_there(commands, series, capsys):
    assert course.main(["lab", "42"]) == 1
    assert "got '42'. There are: 00_the_start.ipynb, 01_lög.ipynb." in capsys.readouterr().err
    assert commands == []


def test_test_runs_everything_strictly_or_what_is_named(commands):
    course.main(["test"])
    (command,) = commands
    assert command[-2:] == ["tests", "notebooks"] and "--nbval" in command
    assert command[command.index("--dist") + 1] == "loadscope"
    assert command[command.index("-p") + 1] == "no:randomly"
    course.main(["test", "-k", "lab"])
    assert commands[-1][-4:] == ["tests", "notebooks", "-k", "lab"]
    course.main(["test", "tests/test_course.py::test_test", "-x"])
    assert "notebooks" not in commands[-1]


def test_test_gpu_without_a_gpu_says_so(commands, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert course.main(["test", "--gpu"]) == 2
    assert "sees no CUDA device" in capsys.readouterr().err and commands == []


def test_test_gpu_asks_for_cuda_and_runs_everything(commands, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("NAN_LAB_DEVICE", "cpu")
    assert course.main(["test", "--gpu", "-x"]) == 0
    assert os.environ["NAN_LAB_DEVICE"] == "cuda"
    assert commands[-1][-3:] == ["tests", "notebooks", "-x"]


def test_test_noise_and_machines_run_the_notebooks(commands, monkeypatch):
    ran = []
    monkeypatch.setattr(
        machines, "compare_under_noise", lambda seeds, rest: ran.append((list(seeds), rest)) or 0
    )
    monkeypatch.setattr(machines, "compare_on_cpus", lambda rest: ran.append(rest) or 1)
    assert course.main(["test", "--noise", "2", "notebooks/00_the_incident.ipynb"]) == 0
    assert course.main(["test", "--noise"]) == 0
    assert course.main(["test", "--machines"]) == 1
    assert ran == [([0, 1], ["notebooks/00_the_incident.ipynb"]), (list(range(20)), []), []]


def test_build_takes_numbers_or_all(commands, series, monkeypatch):
    built = []
    monkeypatch.setattr(notebooks, "build", lambda paths: built.append(len(paths)) or 0)
    assert course.main(["build"]) == course.main(["build", "01"]) == 0
    assert built == [2, 1]


@pytest.mark.parametrize("arguments, status", [([], 2), (["tset"], 2), (["--help"], 0)])
def test_without_a_subcommand_the_usage_is_printed(arguments, status, capsys):
    assert course.main(arguments) == status
    assert "course.py lab [00]" in capsys.readouterr().out


def test_the_environments_python_takes_over(commands, monkeypatch, tmp_path):
    folder = fake_environment(tmp_path / "venv")
    monkeypatch.setattr(course, "environment", lambda: folder)
    monkeypatch.setenv(course.INSIDE, "")
    monkeypatch.delenv(course.INSIDE)
    course.main(["test", "-x"])
    assert commands[-1] == [
        str(environment.python_of(folder)),
        str(ROOT / "course.py"),
        "test",
        "-x",
    ]
    assert os.environ[course.INSIDE] == "1"


def test_problems_are_printed_without_a_traceback(commands, monkeypatch, capsys):
    def fail():
        raise problems.Problem("Connect and start this again.")

    monkeypatch.setattr(course, "environment", fail)
    assert course.main(["lab"]) == 1
    assert capsys.readouterr().err == "Connect and start this again.\n"
