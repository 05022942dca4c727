"""Stands for CUDA graphs where there are none: what is recorded is called again, on the memory that it knew."""

from __future__ import annotations


class Recorder:
    """A pool of graphs that are none: replaying calls the function. Counts what was recorded, replayed and dropped."""

    made: list[Recorder] = []

    def __init__(self):
        self.recorded, self.replays, self.dropped = 0, 0, 0
        Recorder.made.append(self)

    def __call__(self, work):
        self.recorded += 1
        pool, alive = self, [True]

        class Graph:
            def replay(self):
                assert alive[0], "a dropped graph was replayed"
                pool.replays += 1
                work()

            def reset(self):
                alive[0] = False
                pool.dropped += 1

        return Graph()
