"""The three lists of dependencies say the same."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
#: What conda calls differently.
CONDA = {"pytorch": "torch"}


def name(requirement):
    return re.match(r"[A-Za-z0-9_.-]+", requirement)[0].lower().replace("_", "-")


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def constraints():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if line.strip() and not line.startswith("#")]
    return {name(package): version for package, version in pins}


def environment():
    return yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]


def conda_pins():
    pins = dict(line.split("=") for line in environment() if isinstance(line, str) and re.search(r"\w=\d", line))
    return {CONDA.get(package, package): version for package, version in pins.items()}


def test_every_dependency_is_pinned_exactly():
    needed = {name(r) for r in [*project()["dependencies"], *project()["optional-dependencies"]["dev"]]}
    assert needed - set(constraints()) == set()


def test_conda_gets_what_pip_gets_in_the_same_versions():
    needed = {name(r) for r in [*project()["dependencies"], *project()["optional-dependencies"]["dev"]]}
    pins = constraints()
    assert conda_pins() == {package: pins[package] for package in needed}


def test_conda_asks_for_the_python_that_the_package_asks_for_and_installs_the_checkout():
    assert f"python{project()['requires-python']}" in environment()
    assert {"pip": ["-e ."]} in environment()


def test_a_minimum_is_not_above_the_pin():
    for requirement in project()["dependencies"]:
        if ">=" in requirement:
            least = requirement.partition(">=")[2]
            as_numbers = [
                tuple(map(int, v.split("+")[0].split("."))) for v in (least, constraints()[name(requirement)])
            ]
            assert as_numbers[0] <= as_numbers[1]
