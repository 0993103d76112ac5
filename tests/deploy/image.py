"""`make image`: the image of deploy/Dockerfile is built, and a node started in it as Kubernetes starts one.

    python -m tests.deploy.image [BASE]

It needs root and the programs buildah and debootstrap, no daemon of containers. BASE is an image with Python;
by default it is made here of Debian's packages, in build/image. The node runs as the image's user, on a root
that cannot be written to, with a volume that is its group's, and has to stop in order.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "image"
PACKAGES = "python3,python3-venv,ca-certificates"
# What this machine's pip is told counts in the build, too.
GIVEN = ("/etc/ssl/certs", "/etc/pip.conf")
HOST, PORT = "127.77.251.1", 7070
USER = 10001


def buildah(*words: str) -> str:
    """Run buildah with images in a folder of ours; return what it prints."""
    program = ["buildah", "--root", str(FOLDER / "images"), "--runroot", str(FOLDER / "run")]
    ran = subprocess.run(
        [*program, "--storage-driver", "vfs", *words], stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True
    )
    return ran.stdout.strip()


def debian() -> str:
    """Return an image of Debian with Python, made once."""
    name = "debian-python"
    if name in buildah("images", "--format", "{{.Name}}"):
        return name
    root = FOLDER / "debian"
    shutil.rmtree(root, ignore_errors=True)
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "stable", str(root)],
        stdout=subprocess.DEVNULL,
        check=True,
    )
    container = buildah("from", "scratch")
    buildah("add", "--quiet", container, str(root), "/")
    buildah("commit", "--quiet", container, name)
    buildah("rm", container)
    shutil.rmtree(root)
    return name


def build(base: str) -> str:
    """Return the folder with the files of the image, of which a container was made."""
    mounts = [word for path in GIVEN if Path(path).exists() for word in ("--volume", f"{path}:{path}:ro")]
    words = ["--isolation", "chroot", "--build-arg", f"BASE={base}", *mounts, "--tag", "laminar"]
    buildah("build", "--quiet", *words, "--file", "deploy/Dockerfile", ".")
    return buildah("mount", buildah("from", "laminar"))


def start(root: str, volume: Path) -> subprocess.Popen[bytes]:
    """Start the image's command in namespaces of its own: the root is read-only, the volume is not."""
    settings = {
        "PATH": "/opt/laminar/bin:/usr/bin:/bin",
        "LAMINAR_DATA": "/var/lib/laminar/data",
        "LAMINAR_HOST": HOST,
        "LAMINAR_PORT": str(PORT),
        "LAMINAR_SHARDS": "1",
        "LAMINAR_DEFAULT_REPLICAS": "1",
    }
    script = (
        'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && mount --bind "$2" "$1/var/lib/laminar" '
        '&& mount -t proc proc "$1/proc" && shift 2 && exec "$@"'
    )
    chroot = ["chroot", f"--userspec={USER}:{USER}", root, "env", "-i"]
    words = [f"{name}={value}" for name, value in settings.items()]
    return subprocess.Popen(
        [
            "unshare",
            "--mount",
            "sh",
            "-c",
            script,
            "sh",
            root,
            str(volume),
            *chroot,
            *words,
            "laminar",
            "serve",
        ]
    )


def until_ready(node: subprocess.Popen[bytes]) -> None:
    """Wait until the node is ready; fail if it ends before."""
    deadline = time.monotonic() + 60
    url = f"http://{HOST}:{PORT}/readyz?replicas=current"
    while time.monotonic() < deadline and node.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    node.kill()
    raise SystemExit(f"the node was not ready: exit code {node.poll()}")


def main(arguments: list[str]) -> None:
    """Build, start, stop."""
    missing = [name for name in ("buildah", "debootstrap", "unshare") if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        raise SystemExit(
            f"needs root, and {', '.join(missing) or 'has all programs'} (Debian: apt-get install)"
        )
    FOLDER.mkdir(parents=True, exist_ok=True)
    root = build(arguments[0] if arguments else debian())
    volume = FOLDER / "volume"
    shutil.rmtree(volume, ignore_errors=True)
    volume.mkdir()
    os.chown(volume, 0, USER)
    volume.chmod(0o2775)
    node = start(root, volume)
    try:
        until_ready(node)
        token = volume / "data" / "admin-token"
        found = token.stat()
        assert (USER, 0o600) == (found.st_uid, found.st_mode & 0o777), "the first token is another user's"
        node.send_signal(signal.SIGTERM)
        code = node.wait(60)
    finally:
        node.kill()
        buildah("rm", "--all")
    if code != 0:
        raise SystemExit(f"the node ended with {code}")
    print(
        "the image builds; a node in it starts as its user on a read-only root, is ready, and stops in order"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
