"""Build the wheel, look at what is in it, and run README's example with it in a fresh environment elsewhere.

python tools/try_wheel.py [--constraint FILE]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {  # folders of the checkout, and where a wheel has them
    "quintnet": "quintnet",
    "quintnet_compiler": "quintnet_compiler",
    "passes": "quintnet_compiler/passes",
    "cost_models": "quintnet_compiler/cost_models",
}
SHIPPED_SUFFIXES = frozenset({".py", ".pyi", ".typed", ".jinja", ".css", ".js"})


def expected_files() -> set[str]:
    """Return the files of the packages by their names in a wheel."""
    names = set()
    for folder, target in SOURCES.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in SHIPPED_SUFFIXES:
                names.add(f"{target}/{path.relative_to(ROOT / folder).as_posix()}")
    return names


def problems(names: Iterable[str]) -> list[str]:
    """Return what is wrong with the files of a wheel: what is missing, and what the checkout does not have."""
    packaged = {name for name in names if ".dist-info/" not in name}
    expected = expected_files()
    missing = [f"missing: {name}" for name in sorted(expected - packaged)]
    return missing + [f"not in the checkout: {name}" for name in sorted(packaged - expected)]


def example() -> str:
    """Return the Python of README that runs."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return "\n".join(re.findall(r"^```python\n(.*?)^```", readme, re.S | re.M))


def try_wheel(folder: Path, constraint: Path) -> list[str]:
    """Build and install the wheel below ``folder``, and run it there.

    Returns:
        What is wrong with the wheel's files; empty: nothing.

    Raises:
        subprocess.CalledProcessError: if a command fails.
    """
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(build, check=True)
    (wheel,) = folder.glob("*.whl")
    if wrong := problems(zipfile.ZipFile(wheel).namelist()):
        return wrong
    venv.create(folder / "venv", with_pip=True)
    binaries = folder / "venv" / "bin"
    install = [str(binaries / "python"), "-m", "pip", "install", "--quiet", "--constraint", str(constraint)]
    subprocess.run([*install, "torch", str(wheel)], check=True)
    (folder / "example.py").write_text(example(), encoding="utf-8")
    outside = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    for command in ([str(binaries / "python"), "example.py"], [str(binaries / "quintnet"), "--help"]):
        subprocess.run(command, check=True, cwd=folder, env=outside, stdout=subprocess.DEVNULL)
    return []


def main() -> int:
    """Try the wheel; 0 if nothing is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--constraint", type=Path, default=ROOT / "constraints.txt", help="versions to install")
    constraint = parser.parse_args().constraint.resolve()
    with tempfile.TemporaryDirectory() as folder:
        wrong = try_wheel(Path(folder), constraint)
    print("\n".join(wrong) or "the wheel runs")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
