"""The table of channels is a function of the log; below `next` a record is out, aside or done."""

from __future__ import annotations

from typing import NoReturn, TypeAlias

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from laminar.batch import Header, stamp
from laminar.node.partition.state.channel_changes import (
    Acknowledged,
    Change,
    Closed,
    Copied,
    Deleted,
    Failed,
    GivenOut,
    Opened,
    Retried,
    Sought,
    channel_entry,
    runs_of,
    spaced,
    spaced_runs,
)
from laminar.node.partition.state.channels import Aside, Channels, Copy, Out, Started, StoredChannel, Why
from laminar.node.partition.state.pins import Pinned, PinsEnded, StoredPins
from laminar.wire.channels import ChannelSettings

SETTINGS = ChannelSettings()
BATCHES = [(b"s" * 16, 1, 1), (b"s" * 16, 1, 2), (b"s" * 16, 2, 2), (b"t" * 16, 1, 1)]


def entry(index: int, *changes: Change, time_ms: int | None = None) -> tuple[Header, bytearray]:
    frame = channel_entry(changes)
    time_ms = 1_000 * index if time_ms is None else time_ms
    stamp(frame, index=index, term=1, prev_term=1, base_offset=0, append_time_ms=time_ms, committed_index=0)
    return Header.unpack(frame), frame


def opened(channel: int = 7, start: int = 0) -> Opened:
    return Opened(channel, "billing", channel, SETTINGS, start)


def test_what_a_filter_passed_over_is_not_looked_at_again() -> None:
    """An entry may only say how far was looked. The next leader goes on there."""
    channels = Channels()
    channels.appended(*entry(1, opened()))
    channels.appended(*entry(2, GivenOut(7, 5, 30_000)))
    assert (channels.by_id[7].next, channels.by_id[7].open) == (5, 0)


def test_a_record_that_is_given_out_is_out_until_it_is_acknowledged() -> None:
    """Acknowledgements in any order leave nothing; the number of the delivery is the entry's."""
    channels = Channels()
    channels.appended(*entry(1, opened()))
    channels.appended(*entry(2, GivenOut(7, 5, 30_000, fresh=[0, 5])))
    channel = channels.by_id[7]
    assert channel.out == {offset: Out(2, 1, 30_000, 0) for offset in range(5)}

    channels.appended(*entry(3, Acknowledged(7, spaced_runs([(1, 1), (3, 2)]))))

    assert sorted(channel.out) == [0, 2]
    assert (channel.next, channel.floor) == (5, 0)
    channels.appended(*entry(4, Acknowledged(7, spaced_runs([(0, 1), (2, 1)]))))
    assert (channel.open, channel.floor) == (0, 5)


def test_a_failed_record_is_aside_with_its_attempts_and_given_out_again() -> None:
    """An attempt that does not count leaves the number as it was; one too many makes it dead."""
    channels = Channels()
    channels.appended(*entry(1, opened()))
    channels.appended(*entry(2, GivenOut(7, 3, 30_000, fresh=[0, 3])))
    channels.appended(*entry(3, Failed(7, [0, 500, 1, 1, 0, 0, 1, -1, 1], "no luck")))
    channel = channels.by_id[7]

    assert channel.aside == {
        0: Aside(1, 3_500, 500, 0, Why.RETRY, "no luck"),
        1: Aside(0, 3_000, 0, 0, Why.RETRY, "no luck"),
        2: Aside(1, 3_000, 0, 0, Why.DEAD, "no luck"),
    }
    channels.appended(*entry(4, GivenOut(7, 3, 9_000, again=spaced([0, 1]))))
    assert channel.out == {0: Out(4, 2, 9_000, 0), 1: Out(4, 1, 9_000, 0)}
    channels.appended(*entry(5, Retried(7, [2, 0])))
    assert channel.aside == {2: Aside(0, 5_000, 0, 0, Why.RETRY, "no luck")}


def test_in_order_by_key_the_others_of_a_key_wait() -> None:
    """What is passed over is named with the hash of its key."""
    channels = Channels()
    channels.appended(*entry(1, opened()))
    channels.appended(
        *entry(2, GivenOut(7, 4, 30_000, fresh=[0, 1, 2, 1], keys=[11, 12], busy=[1, 11, 1, 11]))
    )
    channel = channels.by_id[7]

    assert {offset: out.key for offset, out in channel.out.items()} == {0: 11, 3: 12}
    assert channel.aside == {offset: Aside(0, 0, 0, 11, Why.BUSY) for offset in (1, 2)}
    channels.appended(*entry(3, GivenOut(7, 4, 30_000, again=[1])))
    assert channel.out[1] == Out(3, 1, 30_000, 11)


def test_seeking_back_gives_out_again_and_forward_keeps_what_is_open() -> None:
    """What is out before the new position comes again; with `drop` only the dead are left."""
    channels = Channels()
    channels.appended(*entry(1, opened()))
    channels.appended(*entry(2, GivenOut(7, 6, 30_000, fresh=[0, 6])))
    channels.appended(*entry(3, Failed(7, [1, 60_000, 1, 1, -1, 1])))
    channel = channels.by_id[7]

    channels.appended(*entry(4, Sought(7, 4)))

    assert (channel.next, sorted(channel.out), sorted(channel.aside)) == (4, [], [0, 1, 2, 3])
    assert channel.aside[0] == Aside(0, 4_000, 0, 0, Why.RETRY), "its consumer did not fail"
    assert channel.aside[1].due_ms == 63_000
    channels.appended(*entry(5, Sought(7, 100, drop=True)))
    assert (channel.next, list(channel.aside)) == (100, [2]), "a dead one waits for a person"


def test_the_start_of_the_log_takes_what_is_before_it() -> None:
    """A channel counts what it lost: records out, aside, and never looked at."""
    channels = Channels()
    channels.appended(*entry(1, opened(), opened(8, start=50)))
    channels.appended(*entry(2, GivenOut(7, 4, 30_000, fresh=[0, 4])))
    channels.appended(*entry(3, Failed(7, [1, 0, 1])))

    channels.started(4, Started(3, 10))

    assert (channels.by_id[7].next, channels.by_id[7].open, channels.by_id[7].lost) == (10, 0, 10)
    assert (channels.by_id[8].next, channels.by_id[8].lost) == (50, 0)
    channels.truncated(4)
    assert (channels.by_id[7].next, channels.by_id[7].open, channels.by_id[7].lost) == (4, 4, 0)


def test_a_channel_is_closed_and_opened_again_under_another_id() -> None:
    """Later settings count from their entry on; what names a closed channel changes nothing."""
    channels = Channels()
    channels.appended(*entry(1, opened()))
    paused = ChannelSettings(paused=True)
    channels.appended(*entry(2, Opened(7, "billing", 9, paused, 77), Opened(7, "billing", 8, SETTINGS, 0)))
    assert (channels.by_id[7].settings, channels.by_id[7].next) == (paused, 0)

    channels.appended(*entry(3, Closed(7), GivenOut(7, 4, 30_000, fresh=[0, 4])))

    assert channels.stored() == []
    channels.truncated(3)
    assert channels.by_id[7].version == 9


def copied(index: int, *offsets: int) -> Copied:
    return Copied(0, spaced(offsets), [100 + offset for offset in offsets], 50, b"%d" % index)


def test_a_copy_is_of_what_is_open_and_changes_nothing_else() -> None:
    """What ended before its entry has none; it goes with the last channel that has the record open."""
    channels = Channels()
    channels.appended(*entry(1, opened(7), opened(8)))
    channels.appended(*entry(2, GivenOut(7, 4, 30_000, fresh=[0, 4]), GivenOut(8, 2, 30_000, fresh=[0, 2])))
    channels.appended(*entry(3, Failed(7, [1, -1, 1]), Acknowledged(7, spaced_runs([(2, 1)]))))
    before = [(dict(each.out), dict(each.aside), each.next) for each in channels.by_id.values()]

    channels.appended(*entry(4, copied(4, 0, 1, 2, 9)))

    assert channels.copies == {0: Copy(4, 0, 50, 100), 1: Copy(4, 1, 50, 101)}
    assert before == [(each.out, each.aside, each.next) for each in channels.by_id.values()]
    assert channels.uncopied(0) == {3}
    channels.appended(*entry(5, Acknowledged(7, spaced_runs([(0, 2)]))))
    assert sorted(channels.copies) == [0, 1], "the other channel has them"
    channels.appended(*entry(6, Retried(7, [1, 0]), copied(6, 1), Acknowledged(8, [0, 1])))
    assert channels.copies == {1: Copy(6, 0, 50, 101)}, "the last copy counts"
    channels.appended(*entry(7, Closed(8)))
    assert not channels.copies
    channels.truncated(6)
    assert channels.copies == {0: Copy(4, 0, 50, 100), 1: Copy(4, 1, 50, 101)}


def test_the_start_of_the_log_leaves_what_has_a_copy_after_it() -> None:
    """What has none, or one that goes too, is lost; a person's deletion takes copies, too."""
    channels = Channels()
    channels.appended(*entry(1, opened()))
    channels.appended(*entry(2, GivenOut(7, 9, 30_000, fresh=[0, 9])))
    channels.appended(*entry(3, Failed(7, [0, -1, 1, 1, -1, 1, 1, 5, 1])))
    channels.appended(*entry(4, copied(4, 0, 1)))
    channels.appended(*entry(5, copied(5, 1, 3, 8)))

    channels.started(6, Started(4, 6))

    channel = channels.by_id[7]
    assert (sorted(channel.aside), sorted(channel.out)) == ([1], [3, 6, 7, 8])
    assert (channel.next, channel.lost) == (9, 4)
    assert sorted(channels.copies) == [1, 3, 8]
    channels.appended(*entry(7, Deleted(0, 8)))
    assert (sorted(channel.aside), sorted(channel.out), channel.lost) == ([], [6, 7, 8], 6)
    assert sorted(channels.copies) == [8]


class Unlisted(dict[int, Copy]):
    """Copies that may be looked up, and not gone through."""

    def __iter__(self) -> NoReturn:
        raise AssertionError("the copies of all channels are gone through for each channel")

    keys = items = values = __iter__


def test_the_copies_of_other_channels_cost_a_channel_nothing() -> None:
    """With 64 channels and 200,000 copies each stored table took seconds, in one turn of the loop."""
    channels = Channels()
    channels.appended(*entry(1, opened(7), opened(8)))
    channels.appended(*entry(2, GivenOut(7, 4, 30_000, fresh=[0, 4]), GivenOut(8, 2, 30_000, fresh=[0, 2])))
    channels.appended(*entry(3, copied(3, 0, 2)))
    stored = channels.stored()
    assert [each.copies for each in stored] == [[0, 3, 0, 50, 100, 2, 3, 1, 50, 102], [0, 3, 0, 50, 100]]

    channels.copies = Unlisted(channels.copies)

    assert channels.stored() == stored
    assert channels.uncopied(0) == {1, 3}


def pinned(batch: tuple[bytes, int, int], *offsets: int, channel: int = 7) -> Pinned:
    return Pinned(channel, *batch, runs=spaced_runs(runs_of(offsets)))


def test_what_a_batch_has_pinned_ends_with_it_done_or_out_as_before() -> None:
    """All of one batch at once, in all channels; another batch of the sink, or epoch, touches none of it."""
    channels = Channels()
    channels.appended(*entry(1, opened(), opened(8)))
    channels.appended(*entry(2, GivenOut(7, 5, 30_000, fresh=[0, 5]), GivenOut(8, 2, 30_000, fresh=[0, 2])))
    one, newer, next_, other = BATCHES
    channels.appended(*entry(3, pinned(one, 0, 1, 3), pinned(one, 1, channel=8)))
    channels.appended(*entry(4, pinned(newer, 3, 4)))
    channel = channels.by_id[7]
    assert channels.pinned(one) == {7: [0, 1, 3], 8: [1]}
    assert channels.pinned(newer) == {7: [4]}, "3 is the other's"
    assert sorted(channel.out) == [0, 1, 2, 3, 4]

    for ended in (next_, other):
        channels.appended(*entry(5, PinsEnded(*ended, done=True)))
    assert channels.pinned(one) == {7: [0, 1, 3], 8: [1]}
    channels.appended(*entry(6, PinsEnded(*newer, done=False)))
    assert (sorted(channel.out), sorted(channel.pins)) == ([0, 1, 2, 3, 4], [0, 1, 3]), "out as before"
    channels.appended(*entry(7, PinsEnded(*one, done=True)))
    assert (sorted(channel.out), channel.pins, channels.pins) == ([2, 4], {}, {})
    assert (sorted(channels.by_id[8].out), channels.by_id[8].aside) == ([0], {})
    channels.truncated(7)
    assert channels.pinned(one) == {7: [0, 1, 3], 8: [1]}


def test_a_stored_table_has_what_is_pinned() -> None:
    """Else a replica that begins with it would give out again what a decision counts as done."""
    channels, restored = Channels(), Channels()
    channels.appended(*entry(1, opened(), opened(8)))
    channels.appended(*entry(2, GivenOut(7, 5, 30_000, fresh=[0, 5]), GivenOut(8, 2, 30_000, fresh=[0, 2])))
    one, newer, *_ = BATCHES
    channels.appended(*entry(3, pinned(one, 0, 1, 3), pinned(one, 1, channel=8)))
    channels.appended(*entry(4, pinned(newer, 4)))
    restored.restore(*_state(channels))

    assert restored.pinned(one) == {7: [0, 1, 3], 8: [1]}
    assert (restored.pinned(newer), restored.pins[newer].entry) == ({7: [4]}, 4)
    restored.appended(*entry(5, PinsEnded(*one, done=True)))
    assert (sorted(restored.by_id[7].out), sorted(restored.by_id[7].pins)) == ([2, 4], [4])


def test_a_batch_is_pinned_by_one_entry() -> None:
    """A late request does not add to what a decision may name; once ended it is another, by its index."""
    channels = Channels()
    channels.appended(*entry(1, opened()))
    channels.appended(*entry(2, GivenOut(7, 5, 30_000, fresh=[0, 5])))
    channels.appended(*entry(3, pinned(BATCHES[0], 0)))
    channels.appended(*entry(4, pinned(BATCHES[0], 1)))

    assert (channels.pinned(BATCHES[0]), channels.pins[BATCHES[0]].entry) == ({7: [0]}, 3)
    channels.appended(*entry(5, PinsEnded(*BATCHES[0], done=True)))
    channels.appended(*entry(6, pinned(BATCHES[0], 1)))
    assert (channels.pinned(BATCHES[0]), channels.pins[BATCHES[0]].entry) == ({7: [1]}, 6)


def test_what_is_moved_or_deleted_is_not_pinned_any_more() -> None:
    """A seek, a close, or the start of the log takes records; the end of their batch finds the others."""
    channels = Channels()
    channels.appended(*entry(1, opened(), opened(8), opened(9)))
    for index, channel in enumerate((7, 8, 9), start=2):
        channels.appended(*entry(index, GivenOut(channel, 4, 30_000, fresh=[0, 4])))
    channels.appended(*entry(5, *(pinned(BATCHES[0], 0, 1, channel=each) for each in (7, 8, 9))))
    channels.appended(*entry(6, Sought(7, 1), Closed(8)))
    channels.started(7, Started(6, 1))
    assert channels.pinned(BATCHES[0]) == {9: [1]}

    channels.appended(*entry(8, GivenOut(7, 4, 30_000, fresh=[1, 3])))
    channels.appended(*entry(9, PinsEnded(*BATCHES[0], done=True)))
    assert sorted(channels.by_id[7].out) == [1, 2, 3], "given out again by a person's word: another delivery"
    assert sorted(channels.by_id[9].out) == [2, 3]
    assert channels.pins == {}


# -- properties ---------------------------------------------------------------------------------

_OFFSETS = st.lists(st.integers(0, 12), unique=True, max_size=6).map(sorted)


@st.composite
def _changes(draw: st.DrawFn) -> Change | _Draft:
    channel = draw(st.integers(1, 2))
    what = draw(st.integers(0, 12))
    offsets = draw(_OFFSETS)
    if what == 0:
        return Opened(channel, "c", draw(st.integers(1, 5)), SETTINGS, draw(st.integers(0, 5)))
    if what == 1 and draw(st.integers(0, 3)) == 0:
        return Closed(channel)
    if what <= 4:
        return _Draft(channel, draw(st.integers(0, 4)), draw(st.booleans()), offsets)
    if what == 5:
        items = [part for distance in spaced(offsets) for part in (distance, draw(st.integers(-1, 9)), 1)]
        return Failed(channel, items, "x")
    if what == 6:
        return Sought(channel, draw(st.integers(0, 15)), draw(st.booleans()))
    if what == 9:
        return Deleted(0, draw(st.integers(0, 12))) if draw(st.integers(0, 3)) == 0 else copied(0, *offsets)
    if what == 7:
        return Retried(channel, [part for distance in spaced(offsets) for part in (distance, 5)])
    if what in (10, 11):
        sink, number, epoch = draw(st.sampled_from(BATCHES))
        if what == 10:
            return Pinned(channel, sink, number, epoch, spaced_runs(runs_of(offsets)))
        return PinsEnded(sink, number, epoch, draw(st.booleans()))
    return Acknowledged(channel, spaced_runs(runs_of(offsets)))


class _Draft(msgspec.Struct, frozen=True):
    """A `GivenOut` whose offsets depend on the table: how many are passed, and what of them."""

    channel: int
    count: int
    ordered: bool
    again: list[int]

    def made(self, channels: Channels) -> GivenOut:
        channel = channels.by_id.get(self.channel)
        if channel is None:
            return GivenOut(self.channel, 0, 1_000)
        again = [each for each in self.again if each in channel.aside]
        fresh = list(range(channel.next, channel.next + self.count))
        busy = fresh[1::2] if self.ordered else []
        given_out = [each for each in fresh if each not in busy]
        return GivenOut(
            self.channel,
            channel.next + self.count,
            1_000,
            fresh=spaced_runs(runs_of(given_out)),
            again=spaced(again),
            keys=[5] * len(given_out) if self.ordered else [],
            busy=[part for distance in spaced(busy) for part in (distance, 5)],
        )


def _state(channels: Channels) -> _State:
    return channels.stored(), channels.stored_pins()


_State: TypeAlias = tuple[list[StoredChannel], list[StoredPins]]


def _logged(drafts: list[list[Change | _Draft]], starts: set[int]) -> tuple[Channels, list[_State]]:
    """The table after all entries, with every state on the way; the first is the empty one."""
    channels = Channels()
    states: list[_State] = [([], [])]
    for index, draft in enumerate(drafts, start=1):
        if index in starts:
            channels.started(index, Started(index // 2, index))
        else:
            for each in draft:  # one after the other, as each is made by the table before it
                made = each.made(channels) if isinstance(each, _Draft) else each
                channels.appended(*entry(index, made))
        states.append(_state(channels))
    return channels, states


@given(
    st.lists(st.lists(_changes(), min_size=1, max_size=3), max_size=25),
    st.sets(st.integers(1, 25), max_size=2),
    st.data(),
)
def test_truncation_leaves_what_a_rebuild_would_give(
    drafts: list[list[Change | _Draft]], starts: set[int], data: st.DataObject
) -> None:
    """Rolled back to any entry, or asked for its state then, it is what it was; stored, it is restored."""
    channels, states = _logged(drafts, starts)
    kept = data.draw(st.integers(0, len(drafts)))
    before = data.draw(st.integers(0, kept))
    channels.committed(before)

    assert (channels.stored_at(kept), channels.stored_pins_at(kept)) == states[kept]
    assert _state(channels) == states[-1], "to be asked changes nothing"
    channels.truncated(kept + 1)

    assert _state(channels) == states[kept]
    restored = Channels()
    restored.restore(*_state(channels))
    assert _state(restored) == states[kept]
    assert restored.copies == channels.copies
    for batch in BATCHES:
        for table in (channels, restored):  # they go on alike
            table.appended(*entry(len(drafts) + 1, PinsEnded(*batch, done=True)))
    assert _state(channels) == _state(restored)
    channels.truncated(len(drafts) + 1)
    for channel in channels.by_id.values():
        assert (
            channel.pins.keys() <= channel.out.keys() and set(channel.pins.values()) <= channels.pins.keys()
        )
        assert not channel.out.keys() & channel.aside.keys()
        assert all(offset < channel.next for offset in (*channel.out, *channel.aside))
    assert all(map(channels.has_open, channels.copies)), "a copy is of what is open"
    channels.truncated(before + 1)
    assert _state(channels) == states[before]


@given(st.lists(_changes(), max_size=25), st.sets(st.integers(1, 25), max_size=5))
def test_entries_that_are_lost_stop_none_that_follow(drafts: list[Change | _Draft], lost: set[int]) -> None:
    """What is damaged on all replicas is left out: what came after it was made by a table that had it."""
    whole, lacking = Channels(), Channels()
    for index, each in enumerate(drafts, start=1):
        made = entry(index, each.made(whole) if isinstance(each, _Draft) else each)
        whole.appended(*made)
        if index not in lost:
            lacking.appended(*made)

        for channel in lacking.by_id.values():
            assert not channel.out.keys() & channel.aside.keys()
            assert all(offset < channel.next for offset in (*channel.out, *channel.aside))
    lacking.truncated(1)
    assert _state(lacking) == ([], [])


def test_a_seek_that_is_lost_stops_no_delivery_in_order() -> None:
    """The next delivery names records that are out already by the table without it: they stay so."""
    channels = Channels()
    channels.appended(*entry(1, opened()))
    channels.appended(
        *entry(2, GivenOut(7, 6, 1_000, fresh=[0, 2, 2, 2], keys=[1, 2, 3, 4], busy=[2, 1, 1, 2]))
    )
    before = dict(channels.by_id[7].out)
    # Entry 3 is lost: it moved the channel to 1.
    channels.appended(
        *entry(4, GivenOut(7, 8, 1_000, fresh=[1, 2, 2, 2], keys=[2, 1, 4, 5], busy=[3, 1, 4, 5]))
    )

    channel = channels.by_id[7]
    assert channel.out == before | {6: Out(4, 1, 1_000, 5)}
    assert (sorted(channel.aside), channel.next) == ([2, 3, 7], 8)
