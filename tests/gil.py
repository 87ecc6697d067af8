"""Shows whether a call leaves the GIL free."""

import os
import sys
import threading


class Counting:
    """A thread that counts whenever it gets the GIL, and asks for it again at once.

    With a switch interval of an hour it gets the GIL only where somebody gives it up: a call that keeps it lets the
    thread count once at most, as it begins or ends.
    """

    def __enter__(self):
        self.count = 0
        self.over = False
        self.interval = sys.getswitchinterval()
        sys.setswitchinterval(3600.0)
        self.thread = threading.Thread(target=self.run)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over = True
        self.thread.join()
        sys.setswitchinterval(self.interval)

    def run(self):
        nothing = os.open("/dev/null", os.O_RDONLY)
        while not self.over:
            self.count += 1
            os.read(nothing, 1)  # gives the GIL up for a moment
        os.close(nothing)

    def during(self, call):
        """Counts during one call."""
        before = self.count
        call()
        return self.count - before

    def most_in_one_call(self, call, enough=100, attempts=200):
        """The most counts during one of several calls; no more calls once there were more than enough."""
        most = 0
        for _ in range(attempts):
            most = max(most, self.during(call))
            if most > enough:
                break
        return most
