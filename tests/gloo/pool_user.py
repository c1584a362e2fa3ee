"""A program that uses a pool, with no `if __name__ == "__main__"`. Usage: pool_user.py ENDING."""

import contextlib
import json
import os
import sys

from usp_viz.runtime.pool import Job, RankPool

ending = sys.argv[1]
pool = RankPool(preload=["pool_probes"])


def say(**facts):
    print(json.dumps(facts), flush=True)


def run(probe, payload=None, **options):
    return pool.run(Job(f"pool_probes:{probe}", payload), world=4, timeout_s=600, **options)


def say_when_all_wait(rank, message):
    waiting.append(message["at"])
    if waiting.count("reduced") == 4:
        say(waiting=True)


def pids(report):
    return [rank.pid for rank in report.ranks]


waiting = []
if ending == "while it imports":
    pool.start()
    say(pids=[pool._server._process.pid])
    sys.stdin.read()

report = run("who")
say(pids=[report.ranks[0].value["zygote"], *pids(report)])

if ending == "idle":
    sys.stdin.read()
elif ending == "busy":
    run("pause_on_one", 0, on_message=say_when_all_wait)
elif ending == "raise":
    raise SystemExit(3)
elif ending == "os._exit":
    os._exit(0)
elif ending == "print":
    run("chatter")
    say(torch="torch" in sys.modules)
elif ending == "fork":
    child = os.fork()
    if not child:
        with contextlib.suppress(KeyboardInterrupt):
            say(child=pids(run("who")))
        sys.exit(0)
    os.waitpid(child, 0)
    say(parent=pids(run("who")))
