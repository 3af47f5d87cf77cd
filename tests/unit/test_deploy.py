"""The files of deploy/ pass the checkers of the systems that will read them."""
from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SCRIPTS = sorted([*(DEPLOY / "slurm").glob("*.sbatch"), DEPLOY.parent / ".ci" / "run"])


def tool(name: str) -> str:
    """The path of a checker, from this environment or the system; the test is skipped where there is none."""
    path = shutil.which(name, path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]))
    if path is None:
        pytest.skip(f"{name} is not installed on this machine")
    return path


def verify(unit: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs systemd's checker on a copy whose command exists: the checker refuses one that is not installed here."""
    home = folder / "home"
    program = home / ".local" / "bin" / "zephon"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    (home / "recipes").mkdir()
    copy = folder / unit.name.replace("@.", "@pretrain.")
    copy.write_text(unit.read_text().replace("%h", str(home)))
    environment = {**os.environ, "HOME": str(home), "XDG_RUNTIME_DIR": str(folder)}
    command = [tool("systemd-analyze"), "verify", "--user", "--recursive-errors=no", "--man=no", str(copy)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_accepts_every_line_of_the_unit(unit: Path, tmp_path: Path) -> None:
    result = verify(unit, tmp_path)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


def test_the_check_of_units_notices_a_misspelt_setting(tmp_path: Path) -> None:
    unit = tmp_path / "broken@.service"
    unit.write_text(UNITS[0].read_text().replace("RestartSec", "RestartSeconds"))
    result = verify(unit, tmp_path)
    assert "RestartSeconds" in result.stdout + result.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say_about_the_script(script: Path) -> None:
    command = [tool("shellcheck"), "--shell=bash", "--enable=all", "--exclude=SC2250,SC2312", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_script_is_bash_and_stops_at_the_first_error(script: Path) -> None:
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines
