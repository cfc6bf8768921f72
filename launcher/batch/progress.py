"""How far a batch is, on stderr: one line that rewrites itself on a terminal, else several."""

from collections import Counter
from typing import TextIO

_TERMINAL_S = 0.5
_LOG_S = 10.0


class Progress:
    """Counts a batch's lines for its progress report. total, done, failed: lines of the input; of
    earlier runs, too. Times are in seconds.
    """

    def __init__(self, screen: TextIO, total: int, done: int, failed: int) -> None:
        self._screen = screen
        self._total = total
        self._before = done
        self._started: float | None = None
        self.done = done
        self.failed = failed
        self.kinds = Counter[str]()
        self.note = ""  # why nothing is sent

    @property
    def open(self) -> int:
        """Lines without an answer."""
        return self._total - self.done

    @property
    def interval_s(self) -> float:
        return _TERMINAL_S if self._screen.isatty() else _LOG_S

    def begin(self, now: float) -> None:
        """Notes that the server is ready."""
        self._started = now

    def count(self, failure: str) -> None:
        """Counts a line that has an answer. failure: its kind; "" = none."""
        self.done += 1
        self.failed += failure != ""
        if failure:
            self.kinds[failure] += 1

    def show(self, now: float) -> None:
        text = self.line(now)
        self._write(f"\r{text}\x1b[K" if self._screen.isatty() else f"loraplex: {text}\n")

    def say(self, text: str) -> None:
        """Writes a line that stays."""
        begin, end = ("\r", "\x1b[K") if self._screen.isatty() else ("", "")
        self._write(f"{begin}loraplex: {text}{end}\n")

    def _write(self, text: str) -> None:
        self._screen.write(text)
        self._screen.flush()

    def line(self, now: float) -> str:
        rate = self._rate(now)
        parts = [f"{self.done:,} of {self._total:,} lines", f"{self.failed:,} failed"]
        if rate:
            parts += [f"{rate:.3g} lines a second", f"{duration(self.open / rate)} left"]
        return ", ".join([*parts, *filter(None, [self.note])])

    def summary(self, now: float) -> str:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.kinds.most_common(5))
        run, took = self.done - self._before, duration(self._elapsed(now))
        return (
            f"{self.done:,} of {self._total:,} lines have an answer, {self.failed:,} of them in "
            f"the error file{f' (new: {kinds})' if kinds else ''}; {run:,} in {took}, "
            f"{self._rate(now):.3g} a second"
        )

    def _elapsed(self, now: float) -> float:
        return 0.0 if self._started is None else now - self._started

    def _rate(self, now: float) -> float:
        return (self.done - self._before) / max(self._elapsed(now), 1e-3)


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
