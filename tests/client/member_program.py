"""One member of a group, for `members.py`: what it read and committed is what it prints.

python -m tests.client.member_program URLS TOPIC GROUP SESSION EVERY TAG: it commits after EVERY records.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Sequence

import laminar

_saying = threading.Lock()


def say(*words: object) -> None:
    with _saying:
        print(time.monotonic(), *words, flush=True)


def watch(records: laminar.Subscription[bytes]) -> None:
    known = None
    while True:
        if (owned := records.partitions) != known:
            say("owns", *sorted(owned))
        known = owned
        time.sleep(0.05)


def main(arguments: Sequence[str]) -> None:
    # Also where who started all of this has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    urls, topic, group, session, every, tag = arguments
    with contextlib.suppress(KeyboardInterrupt), laminar.connect(urls.split(",")) as client:
        with client.topic(topic).subscribe(group, tag=tag or None, session=float(session)) as records:
            say("joined")
            threading.Thread(target=watch, args=(records,), daemon=True).start()
            for number, record in enumerate(records, 1):
                say("read", record.partition, record.offset, record.text)
                if number % int(every) == 0:
                    try:
                        records.commit()
                        say("committed")
                    except laminar.Fenced as fenced:
                        say("fenced", fenced.value)
                    except laminar.Unavailable:
                        pass  # the next commit covers this, too
                    except laminar.OutcomeUnknown:
                        pass


if __name__ == "__main__":
    main(sys.argv[1:])
