"""Checks what changed since main in two minutes: lint, types, layout, tests of changed files.

    python .ci/check.py [REVISION]     REVISION in place of the point where this branch left main

A test belongs to a changed file if it is that file, has its name (`test_listener.py` for
`listener.py`), or names the changed module. Helpers of the tests choose the tests that import them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_TESTS = 12
"""Test files that run; more are named and left to `make test`."""
SECONDS = 60
"""A test that would begin later than this is skipped, and left to `make test`."""
PAGES = ("tests/test_doc_blocks.py", "tests/test_doc_links.py", "tests/test_docs.py")


def git(*arguments: str) -> list[str]:
    """Return the lines that git prints."""
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.splitlines()


def changed_files(revision: str = "") -> list[str]:
    """Return what differs from where this branch left main, new files included."""
    base = [revision] if revision else []
    for main in ("origin/main", "main"):
        base = base or git("merge-base", "HEAD", main)
    names = git("diff", "--name-only", *base[:1])
    return sorted({*names, *git("ls-files", "--others", "--exclude-standard")})


def tests_of(changed: list[str]) -> list[str]:
    """Return the test files of the changed files, those that changed themselves first."""
    sources = {
        str(path.relative_to(ROOT)): path.read_text() for path in ROOT.glob("tests/**/test_*.py")
    }
    first = [name for name in changed if name in sources]
    chosen = dict.fromkeys(first)
    for name in changed:
        path = Path(name)
        if path.suffix == ".md":
            chosen.update(dict.fromkeys(page for page in PAGES if page in sources))
        elif path.suffix == ".py" and name not in sources:
            package = re.escape(".".join(path.parent.parts).removeprefix("tests."))
            pattern = rf"\b{package}(\.| import .*\b){re.escape(path.stem)}\b"
            named = [test for test in sources if Path(test).stem == f"test_{path.stem}"]
            using = [test for test, text in sources.items() if re.search(pattern, text)]
            chosen.update(dict.fromkeys(named + using))
    return list(chosen)


def steps_of(changed: list[str], tests: list[str]) -> list[list[str]]:
    """Return the commands of the checks, as arguments of Python."""
    python = [name for name in changed if name.endswith(".py")]
    typed = [name for name in python if not name.startswith(("docs/", ".ci/"))]
    steps = [["tests/layout.py"]]
    if python:
        steps += [["-m", "ruff", "check", *python], ["-m", "ruff", "format", "--check", *python]]
    if typed:
        steps.append(["-m", "mypy", *typed])
    if tests:
        chosen = ["-m", "not slow and not gpu", f"--seconds={SECONDS}", *tests]
        steps.append(["-m", "pytest", "-n", "4", *chosen])
    return steps


def main(argv: list[str]) -> int:
    """Run the checks; 1 if one of them failed."""
    changed = [name for name in changed_files(*argv) if (ROOT / name).exists()]
    tests, rest = (found := tests_of(changed))[:MOST_TESTS], found[MOST_TESTS:]
    failed = []
    for step in steps_of(changed, tests):
        print("+", *step, flush=True)
        if subprocess.run([sys.executable, *step], cwd=ROOT, check=False).returncode:
            failed.append(step[step[0] == "-m"])
    if rest:
        print(f"left to `make test`: {len(rest)} more files, {', '.join(rest[:3])}, …")
    print(f"failed: {', '.join(failed)}" if failed else f"{len(changed)} changed files are fine")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
