"""What the loop asks of a storage's other threads beside its records, and who waits for it.

Three threads, in the order that a frame goes through them: the journal's, the segments' writer, and the
background, which has checkpoints and documents. What fails in any of them by a mistake of ours, the process
does not survive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from laminar.log.commit.checkpoints import Done
from laminar.log.commit.group_commit import GroupCommit
from laminar.log.disk.errors import StorageClosed, StorageError
from laminar.log.disk.threads import SerialExecutor


class StorageExecutor:
    """See the module. What returns a future is for the loop's thread, the rest for any."""

    def __init__(
        self,
        commits: GroupCommit,
        *,
        journal: SerialExecutor,
        writer: SerialExecutor,
        background: SerialExecutor,
    ) -> None:
        self._commits = commits
        self._journal = journal
        self._writer = writer
        self._background = background
        # What was handed to other threads and not answered yet.
        self._asked: dict[asyncio.Future[None], None] = {}

    def post_to_writer(self, work: Callable[[], None]) -> None:
        """Run `work` in the writer's thread, at once behind what was handed to it before."""
        self._writer.submit(partial(self._guarded, work))

    def after_synced_frames(self, work: Callable[[], None]) -> None:
        """Run `work` in the writer's thread, behind all frames that are synced by now."""

        # By way of the journal's thread, as the frames it has synced: else this could overtake one whose
        # waiters have been told already.
        def follow() -> None:
            self._commits.flush()
            self.post_to_writer(work)

        self._journal.submit(follow)

    def post_to_background(self, work: Callable[[], None]) -> None:
        """Run `work` in the background's thread, in no order with what is recorded."""
        self._background.submit(partial(self._guarded, work))

    def run_in_writer(self, work: Callable[[], None]) -> asyncio.Future[None]:
        """As `after_synced_frames`; done when `work` is, failed with the `StorageError` that it raises."""
        return self.submit(_answered(work))

    def run_in_background(self, work: Callable[[], None]) -> asyncio.Future[None]:
        """As `post_to_background`; done when `work` is, failed with the `StorageError` that it raises."""
        return self.submit(_answered(work), where=self.post_to_background)

    def submit(
        self, work: Callable[[Done], None], *, where: Callable[[Callable[[], None]], None] | None = None
    ) -> asyncio.Future[None]:
        """Call `work` behind the frames (or where it is said) with what tells the future, now or later."""
        future: asyncio.Future[None] = self._commits.loop().create_future()
        if self._commits.closed or self._commits.failure is not None:
            future.set_exception(StorageClosed(f"the storage is closed: {self._commits.failure}"))
            return future
        self._asked[future] = None

        def finish(error: StorageError | None) -> None:
            self._asked.pop(future, None)
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        submit = where or self.after_synced_frames
        submit(partial(work, lambda error: self._commits.call_on_loop(partial(finish, error))))
        return future

    def fail_all(self, error: BaseException) -> None:
        """The journal failed: nobody waits on. On the loop."""
        asked, self._asked = self._asked, {}
        for future in asked:
            if not future.done():
                future.set_exception(StorageClosed(f"the journal failed: {error!r}"))

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._commits.fail_process(error)
            if not isinstance(error, Exception):
                raise


def _answered(work: Callable[[], None]) -> Callable[[Done], None]:
    """`work`, which tells when it is done and how it failed."""

    def perform(done: Done) -> None:
        try:
            work()
        except StorageError as error:
            done(error)
        else:
            done(None)

    return perform
