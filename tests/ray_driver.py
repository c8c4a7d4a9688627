"""A driver in a process of its own, which a test lets die: `ray_driver.py ADDRESS RUN_DIR PLAN PROGRAM N WHEN STATE`.

It is killed before or after the journal entry of that state is on the disk, and prints nothing then.
"""

import json
import os
import signal
import sys
from pathlib import Path

from ray_cases import TIMEOUTS, advantages, groups

from longstraw_sdk.placement import DirectRayDriver, DirectRayPlan, RankProgram
from longstraw_sdk.placement.ownership import OwnershipJournal


def main(address, run_dir, plan, program, n_updates, when, state):
    write = OwnershipJournal.write

    def killing(self, written, **facts):
        if written == state and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, written, **facts)
        if written == state:
            os.kill(os.getpid(), signal.SIGKILL)

    OwnershipJournal.write = killing
    plan, program = DirectRayPlan.from_json(plan), RankProgram(**json.loads(program))
    given = {"groups": groups, "advantages": advantages, "address": address, "timeouts": TIMEOUTS}
    print(DirectRayDriver(plan, program, Path(run_dir), **given).run(int(n_updates)))


if __name__ == "__main__":
    main(*sys.argv[1:])
