"""Copies in windows: how many are under way, and which share of the bus they take beside steps."""

from __future__ import annotations

from octavo.ops.windows import Windows

BYTES = 1000


class _Clock:
    """A bus of 1,000 bytes a second, and who orders copies on it; late: seconds that each sleep takes longer."""

    def __init__(self, late: float = 0.0) -> None:
        self.now, self.free_at, self.late = 0.0, 0.0, late

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds + self.late

    def event(self, num_bytes: int) -> _Event:
        self.free_at = max(self.free_at, self.now) + num_bytes / 1000
        return _Event(self, self.free_at)


class _Event:
    def __init__(self, clock: _Clock, when: float) -> None:
        self._clock, self.when = clock, when

    def query(self) -> bool:
        return self.when <= self._clock.now

    def synchronize(self) -> None:
        self._clock.now = max(self._clock.now, self.when)

    def elapsed_time(self, end: _Event) -> float:
        return (end.when - self.when) * 1e3


def run(windows: Windows, clock: _Clock, count: int) -> float:
    """Order so many; the bytes a second of all of them."""
    started = clock.now
    for _ in range(count):
        windows.make_room(BYTES)
        windows.ordered(clock.event(BYTES), BYTES)
    return count * BYTES / (clock.free_at - started)


def test_alone_the_bus_is_never_idle() -> None:
    clock = _Clock()
    windows = Windows(3, 0.5, lambda: False, lambda: clock.now, clock.sleep)
    assert run(windows, clock, 50) == 1000
    assert windows.rate == 1000


def test_beside_steps_copies_take_their_share_however_late_a_sleep_ends() -> None:
    for late in (0.0, 0.1, 0.2):
        clock = _Clock(late)
        windows = Windows(3, 0.8, lambda: True, lambda clock=clock: clock.now, clock.sleep)
        run(windows, clock, 10)  # the first ones show the rate
        assert windows.rate == 1000
        assert 0.79 <= run(windows, clock, 1000) / 1000 <= 0.81, late


def test_who_was_away_does_not_catch_up_for_long() -> None:
    clock, computes = _Clock(), True
    windows = Windows(3, 0.5, lambda: computes, lambda: clock.now, clock.sleep)
    run(windows, clock, 20)
    clock.now += 1000.0
    assert 0.5 <= run(windows, clock, 100) / 1000 <= 0.53
    computes = False
    clock.now += 1000.0
    assert run(windows, clock, 100) > 990


def test_windows_behind_an_idle_bus_say_nothing_of_its_rate() -> None:
    """Small transfers now and then, as of blocks that decoding fills: a large one behind them is not held up."""
    clock = _Clock()
    windows = Windows(3, 0.8, lambda: True, lambda: clock.now, clock.sleep)
    for _ in range(12):
        run(windows, clock, 1)
        clock.now += 60.0
    assert windows.rate == 0
    run(windows, clock, 10)
    assert windows.rate == 1000 and 0.79 <= run(windows, clock, 1000) / 1000 <= 0.81


def test_all_of_the_bus_is_a_share_too() -> None:
    clock = _Clock()
    windows = Windows(2, 1.0, lambda: True, lambda: clock.now, clock.sleep)
    assert run(windows, clock, 100) == 1000
