"""Run functions in a storage's threads, and await them on the loop.

There are three threads: the journal's; the segment writer's, which gets the frames from there; and the
background thread, for the syncs and documents of checkpoints. An unexpected exception in one of them is a
mistake in the program, and ends the process.
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
    """Runs functions in the threads of a storage.

    Methods that return a future are for the loop's thread, the others for any thread.
    """

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
        # Futures of work that was submitted to other threads and has not ended.
        self._asked: dict[asyncio.Future[None], None] = {}

    def post_to_writer(self, work: Callable[[], None]) -> None:
        """Run `work` in the segment writer's thread, after the work submitted to that thread before."""
        self._writer.submit(partial(self._guarded, work))

    def after_synced_frames(self, work: Callable[[], None]) -> None:
        """Run `work` in the segment writer's thread, after every frame that is synced when this is called.

        So `work` begins when the writer has written each of them into its segment, or found the disk full.
        """

        # By way of the journal's thread, like the frames that it has synced: else the work could overtake
        # a frame whose waiters have already been woken.
        def follow() -> None:
            self._commits.flush()
            self.post_to_writer(work)

        self._journal.submit(follow)

    def post_to_background(self, work: Callable[[], None]) -> None:
        """Run `work` in the background thread; changes recorded before this call may not be in files yet."""
        self._background.submit(partial(self._guarded, work))

    def run_in_writer(self, work: Callable[[], None]) -> asyncio.Future[None]:
        """Run `work` in the segment writer's thread, after the frames synced so far; return its future.

        The future is done when `work` has returned, or fails with the `StorageError` that `work` raises. See
        `after_synced_frames`.
        """
        return self.submit(_answered(work))

    def run_in_background(self, work: Callable[[], None]) -> asyncio.Future[None]:
        """Run `work` in the background thread; return a future that is done when `work` has returned.

        The future fails with the `StorageError` that `work` raises.
        """
        return self.submit(_answered(work), where=self.post_to_background)

    def submit(
        self, work: Callable[[Done], None], *, where: Callable[[Callable[[], None]], None] | None = None
    ) -> asyncio.Future[None]:
        """Call `work(done)` in another thread; return a future that `done` resolves.

        `where` is the method that runs the call in a thread; None means `after_synced_frames`. `work` must
        call `done` once, at any time and in any thread, with None or the `StorageError` that the future shall
        raise. The future fails with `StorageClosed` if the storage is closed, or its journal fails first.
        """
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
        """Let all waiting futures fail with `StorageClosed`: the journal failed. The loop's thread."""
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
    """Return a function that calls `work`, and then its argument with None or the `StorageError` raised."""

    def perform(done: Done) -> None:
        try:
            work()
        except StorageError as error:
            done(error)
        else:
            done(None)

    return perform
