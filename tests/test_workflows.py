"""The CI workflows: valid, safe, and calling the command that the README names."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import notebooks

BESIDE_PYTHON = Path(sys.executable).parent
linters = pytest.mark.skipif(
    not all(shutil.which(name, path=BESIDE_PYTHON) for name in ("check-jsonschema", "zizmor")),
    reason='needs the extra "ci": python -m pip install -e ".[ci]"',
)
WORKFLOWS = sorted((notebooks.ROOT / ".github" / "workflows").glob("*.yml"))


def scripts(*command):
    """Run a command that was installed beside this Python; return its exit status and output."""
    command = [shutil.which(command[0], path=BESIDE_PYTHON), *command[1:]]
    done = subprocess.run(command, cwd=notebooks.ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@linters
@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_it_follows_github_s_schema(path):
    status, said = scripts("check-jsonschema", "--builtin-schema", "vendor.github-workflows", path)
    assert status == 0, said


@linters
def test_zizmor_finds_no_weakness():
    status, said = scripts("zizmor", "--offline", "--no-progress", ".github")
    assert status == 0, said


@linters
def test_the_linters_can_fail(tmp_path):
    bad = tmp_path / "bad.yml"
    bad.write_text("on: push\njobs:\n  a:\n    runs_on: ubuntu-latest\n")
    assert scripts("check-jsonschema", "--builtin-schema", "vendor.github-workflows", bad)[0] == 1
    bad.write_text("on: pull_request_target\njobs:\n  a:\n    runs-on: x\n    steps: []\n")
    assert scripts("zizmor", "--offline", "--no-progress", bad)[0] != 0


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_least_permissions_a_time_limit_and_the_readme_s_command(path):
    text = path.read_text(encoding="utf-8")
    assert "permissions:\n  contents: read\n" in text and "write" not in text
    jobs = text.count("    runs-on: ")
    assert text.count("    timeout-minutes: ") == jobs
    assert text.count("- run: python course.py test") == jobs


def test_the_gpu_job_is_off_until_a_runner_is_named():
    text = (notebooks.ROOT / ".github/workflows/gpu.yml").read_text(encoding="utf-8")
    assert "    if: vars.GPU_RUNNER != ''\n" in text
    assert "    runs-on: ${{ fromJSON(vars.GPU_RUNNER) }}\n" in text
    assert "- run: nvidia-smi\n" in text and "- run: python course.py test --gpu\n" in text
