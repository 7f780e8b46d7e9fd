"""The suite in fresh virtual environments, with the oldest and the newest versions of torch and transformers that this
package supports. ``python tools/matrix.py [oldest|newest ...] [-- arguments of pytest]``

Environments lie in ``.matrix/``. PyPI's torch for Linux is the build with CUDA: about 5 GB for each environment. Where
pip should look elsewhere is for pip's own settings to say (``PIP_INDEX_URL``, ``PIP_FIND_LINKS``).
"""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parent.parent
VERSIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"oldest": ("2.11.0", "5.14.1"), "newest": ("2.14.1", "5.23.0")}
)
SUITE = ("-n", "auto", "--maxprocesses", "4", "--dist", "worksteal")


def pins(torch: str, transformers: str) -> str:
    """constraints.txt with these two versions in place of its own."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    others = [line for line in lines if not line.startswith(("torch==", "transformers=="))]
    return "\n".join([*others, f"torch=={torch}", f"transformers=={transformers}", ""])


def run(name: str, arguments: Sequence[str]) -> int:
    """Make the environment ``name`` anew and run the suite in it; what pytest exits with."""
    folder = ROOT / ".matrix" / name
    venv.create(folder, clear=True, with_pip=True)
    constraints = folder / "constraints.txt"
    constraints.write_text(pins(*VERSIONS[name]), encoding="utf-8")
    python = [str(folder / "bin" / "python"), "-m"]
    install = [*python, "pip", "install", "--quiet", "--constraint", str(constraints)]
    subprocess.run([*install, "torch"], check=True, cwd=ROOT)
    subprocess.run([*install, "--editable", ".[dev]"], check=True, cwd=ROOT)
    return subprocess.run([*python, "pytest", *arguments], check=False, cwd=ROOT).returncode


def main(given: Sequence[str]) -> int:
    split = given.index("--") if "--" in given else len(given)
    names, arguments = list(given[:split]) or list(VERSIONS), list(given[split + 1 :]) or list(SUITE)
    unknown = [name for name in names if name not in VERSIONS]
    if unknown:
        print(f"{', '.join(unknown)}: the environments are {', '.join(VERSIONS)}", file=sys.stderr)
        return 2
    results = {name: run(name, arguments) for name in names}
    for name, code in results.items():
        torch, transformers = VERSIONS[name]
        print(
            f"{name}: torch {torch}, transformers {transformers}: {'passed' if code == 0 else f'pytest exited {code}'}"
        )
    return max(results.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
