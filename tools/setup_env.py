"""Make the environment that the Makefile runs in: `python3 tools/setup_env.py parity`.

If this Python has jax, torch and triton (as on a GPU machine), the environment shows those and
adds only the missing packages, without a network if none is missing. Otherwise it installs the
versions of `tools/constraints-*.txt`. A stamp makes later calls free until these change.

Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import site
import subprocess
import sys
import sysconfig
import tomllib
import venv
from importlib import metadata
from pathlib import Path
from shutil import which

ROOT = Path(__file__).resolve().parents[1]
FRAMEWORKS = ("jax", "torch", "triton")
# PyTorch's default build for Linux brings several GB of CUDA, of no use without a GPU.
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the environment that the Makefile runs in.")
    parser.add_argument("extras", nargs="+", help="groups and extras of pyproject.toml to provide")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="the environment")
    arguments = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 (this is what tells a user so)
        sys.exit(f"Python: expected 3.11 or newer, got {sys.version.split()[0]} ({sys.executable})")

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = settings["project"] | {"groups": settings["dependency-groups"]}
    minor = min(sys.version_info.minor, 13)
    constraints = ROOT / "tools" / f"constraints-py3{minor}.txt"
    stamp = arguments.venv / "twin-attention.json"
    state = json.loads(stamp.read_text()) if stamp.exists() else {}
    if Path(sys.prefix).resolve() == arguments.venv.resolve():
        # The active environment cannot remake itself.
        python = state.get("python", f"{sys.base_prefix}/bin/python3.{sys.version_info.minor}")
        os.execv(python, [python, *sys.argv])
    key = environment_key(project, constraints)
    provided = set(state["extras"]) if state.get("key") == key else set()
    missing_extras = sorted(set(arguments.extras) - provided)
    if not missing_extras:
        return

    overlay = all(
        satisfied(framework)
        for side in ("jax", "torch")
        for framework in project["optional-dependencies"][side]
    )
    if not provided:
        if (arguments.venv / "pyvenv.cfg").exists() and not stamp.exists():
            sys.exit(
                f"setup: {arguments.venv} holds an environment that this has not made. Remove it,"
                " or name another place: make VENV=folder"
            )
        create(arguments.venv, overlay)
        stamp.write_text(json.dumps({"extras": [], "python": sys.executable}))
    if overlay:
        add_missing(arguments.venv, requirements(project, missing_extras))
    else:
        install_pinned(arguments.venv, constraints, requirements(project, missing_extras))
    extras = sorted(provided | set(missing_extras))
    stamp.write_text(json.dumps({"key": key, "extras": extras, "python": sys.executable}))


def environment_key(project: dict, constraints: Path) -> str:
    """Return a key that changes when the environment is out of date."""
    inputs = [
        sys.executable,
        sys.version,
        {name: installed_version(name) for name in FRAMEWORKS},
        project["dependencies"],
        project["optional-dependencies"],
        project["groups"],
        constraints.read_text(),
    ]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()


def requirements(project: dict, names: list[str]) -> list[str]:
    """Return the project's requirements with groups and extras, resolving references to them."""
    found = list(project["dependencies"])
    for requirement in _named(project, names):
        inner = re.fullmatch(rf"{project['name']}\[(.*)\]", requirement)
        found += requirements(project, inner[1].split(",")) if inner else [requirement]
    return list(dict.fromkeys(found))


def _named(project: dict, names: list[str]) -> list[str]:
    found = []
    for name in names:
        for entry in {**project["optional-dependencies"], **project["groups"]}[name]:
            found += (
                [entry] if isinstance(entry, str) else _named(project, [entry["include-group"]])
            )
    return found


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def satisfied(requirement: str) -> bool:
    """Return True if this Python holds a package at or above the requirement's lower bound."""
    _, _, rest = requirement.partition(";")[0].partition(">=")
    version = installed_version(name_of(requirement))
    return version is not None and release(version) >= release(rest or "0")


def name_of(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement)[0]


def release(version: str) -> list[int]:
    """Return the leading numbers of a version: "2.11.0+cu130" gives [2, 11, 0]."""
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]


def create(directory: Path, overlay: bool) -> None:
    """Make an empty virtual environment; an overlay shows this Python's packages."""
    if overlay:
        frameworks = ", ".join(f"{name} {installed_version(name)}" for name in FRAMEWORKS)
        say(f"{directory.name}: using what {sys.executable} holds ({frameworks})")
    else:
        say(f"{directory.name}: Python {sys.version.split()[0]}, the frameworks pinned in tools/")
    venv.create(directory, clear=True, symlinks=True, with_pip=not overlay)
    if overlay:
        # venv's system_site_packages would show only the base Python's packages. PYTHONPATH may
        # change before the environment is used.
        paths = filter(None, os.getenv("PYTHONPATH", "").split(os.pathsep))
        shown = [str(Path(path).resolve()) for path in paths]
        shown += site.getsitepackages()
        if site.ENABLE_USER_SITE:
            shown.append(site.getusersitepackages())
        lines = [f"import site; site.addsitedir({path!r})\n" for path in shown]
        (site_packages(directory) / "parent.pth").write_text("".join(lines))


def site_packages(directory: Path) -> Path:
    """Return where a virtual environment of this Python keeps packages."""
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(directory)}))


def add_missing(directory: Path, needed: list[str]) -> None:
    """Install into an overlay only what this Python lacks."""
    missing = [requirement for requirement in needed if not satisfied(requirement)]
    if not missing:
        say("nothing is missing, nothing is installed")
        return
    say("installing " + ", ".join(missing))
    python = str(directory / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    # A newer Flax, say, would otherwise bring a newer JAX.
    held = [f"{name}=={installed_version(name)}" for name in FRAMEWORKS]
    if subprocess.run([*pip, "install", "-qq", "--retries", "1", *missing, *held]).returncode:
        sys.exit(
            "setup: these packages are missing and could not be installed: "
            + ", ".join(missing)
            + f"\nInstall them for {sys.executable}; or, without a network, put their wheels into"
            " a folder and\nset PIP_NO_INDEX=1 and PIP_FIND_LINKS to it."
        )


def install_pinned(directory: Path, constraints: Path, needed: list[str]) -> None:
    say(f"installing the versions of {constraints.relative_to(ROOT)} (1-2 minutes)")
    pip = [str(directory / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    # Compiling all of the frameworks' modules would take longer than installing them.
    install = [*pip, "install", "-qq", "--no-compile", "-c", str(constraints)]
    if "torch" in {name_of(requirement) for requirement in needed} and not which("nvidia-smi"):
        cpu = ["--no-deps", "--retries", "0", "--timeout", "10", "--index-url", CPU_INDEX]
        if subprocess.run([*install, *cpu, "torch"], capture_output=True).returncode:
            say("no CPU build of PyTorch at its own index; taking what pip's index has")
    if status := subprocess.run([*install, "--editable", str(ROOT), *needed]).returncode:
        sys.exit(status)


def say(message: str) -> None:
    print(f"setup: {message}", flush=True)


if __name__ == "__main__":
    main()
