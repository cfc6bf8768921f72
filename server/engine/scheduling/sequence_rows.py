"""Rows of the device's tables that sequences hold while they run. Pure."""


class SequenceRows:
    """free: nobody's. freed: given back since the last step, which still has to learn of it."""

    def __init__(self, count: int) -> None:
        self.free = list(range(count - 1, -1, -1))
        self.freed: list[int] = []

    def give_back(self, row: int) -> None:
        self.free.append(row)
        self.freed.append(row)
