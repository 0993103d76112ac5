"""A worker of jobs. python examples/worker.py [URL]. Any number may run at a time; kill any of them."""

import sys

import laminar


def note(file: str, line: str) -> None:
    with open(file, "a") as notes:
        notes.write(line + "\n")


def handle(job: laminar.Job[bytes]) -> None:
    call = job.json()
    task = {"note": note}[call["task"]]
    task(**call["with"])


with laminar.connect(sys.argv[1] if len(sys.argv) > 1 else "http://localhost:7070") as client:
    jobs = client.create_topic("jobs", partitions=2, exist_ok=True)
    jobs.channel("workers", timeout_ms=5_000, exist_ok=True).work(handle, concurrency=4)
