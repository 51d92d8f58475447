"""An emitter in a process of its own that is killed at its nth call to the store, before it is sent or after.

    python -m tests.views.folds.mortal URL PREFIX WATERMARK_MS CALL before|after|never

Between two calls an emitter changes nothing that anybody could see, so these are all the points there are.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from tailrace.valkey.shards import Shards, StoreOptions
from tests.views.folds.rig import RULE, emitter


class MortalShards(Shards):
    """The real thing, for a limited number of calls."""

    left = 0
    after = False

    def run_all(self, commands: Any) -> Any:
        type(self).left -= 1
        if self.left == 0 and not self.after:
            os.kill(os.getpid(), signal.SIGKILL)
        answers = super().run_all(commands)
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return answers


def main() -> None:
    url, prefix, watermark, call, when = sys.argv[1:]
    options = StoreOptions(url, prefix=prefix)
    shards = MortalShards(options).open()
    MortalShards.left = int(call) if when != "never" else -1
    MortalShards.after = when == "after"
    emitter(shards, (RULE,), int(watermark)).turn()


if __name__ == "__main__":
    main()
