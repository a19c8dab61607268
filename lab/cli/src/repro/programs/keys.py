"""Types at something that echoes each byte: keys.py OUT COUNT EVERY_S IDLE_S [LINK,...] -- COMMAND...

COMMAND says "ready", then gives back each of COUNT + 1 bytes, and ends. A key is typed every EVERY_S, whether
the echo of the last has come or not. Then nothing is typed for IDLE_S, and again for as long, and the CPU
time of COMMAND's own process during each is taken. When LINKs get and lose their IPv4 address is noted meanwhile. OUT: JSON.
"""

import fcntl
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time

SIOCGIFADDR = 0x8915  # linux/sockios.h
READY_S = 60
ECHO_S = 150  # how long the last echoes are waited for

cut = sys.argv.index("--")
out, count, every_s, idle_s, *links = sys.argv[1:cut]
count, every_s, idle_s = int(count), float(every_s), float(idle_s)
links = links[0].split(",") if links else []
process = subprocess.Popen(sys.argv[cut + 1 :], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
given = process.stdout.fileno()
asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


def has_address(link):
    try:
        fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", link.encode()))
        return True
    except OSError:
        return False


def cpu():
    """User and system time of all threads, in clock ticks; and time on a CPU of each there is, in ns."""
    fields = open(f"/proc/{process.pid}/stat").read().rsplit(")", 1)[1].split()
    tasks = f"/proc/{process.pid}/task"
    spent = {task: int(open(f"{tasks}/{task}/schedstat").read().split()[0]) for task in os.listdir(tasks)}
    return int(fields[11]) + int(fields[12]), spent


def write(told):
    with open(out + ".part", "w") as file:
        json.dump(told, file)
    os.replace(out + ".part", out)


said, until = b"", time.monotonic() + READY_S
while b"ready" not in said and time.monotonic() < until:
    if select.select([given], [], [], 1)[0]:
        read = os.read(given, 4096)
        if not read:
            break
        said += read
if b"ready" not in said:
    process.kill()
    sys.exit("it is not ready: " + repr(said))
time.sleep(0.5)
while select.select([given], [], [], 0)[0]:
    os.read(given, 4096)  # the end of that line

typed, echoes, wrong = [], [], 0
up = {link: has_address(link) for link in links}
changes = []
begun = time.time()
while len(echoes) < count:
    now = time.time()
    due = begun + len(typed) * every_s
    if len(typed) < count and now >= due:
        typed.append(time.time())
        process.stdin.write(bytes([97 + (len(typed) - 1) % 26]))
        process.stdin.flush()
        continue
    if typed and now > typed[-1] + ECHO_S:
        break
    wait_s = max(0, due - now) if len(typed) < count else 1
    if select.select([given], [], [], min(wait_s, 0.001) if links else wait_s)[0]:
        read, now = os.read(given, 4096), time.time()
        if not read:
            break
        for byte in read:
            wrong += byte != 97 + len(echoes) % 26
            echoes.append(now)
    for link in links:
        if has_address(link) != up[link]:
            up[link] = not up[link]
            changes.append([time.time(), link, up[link]])

told = {
    "typed": len(typed),
    "echoed": len(echoes),
    "wrong": wrong,
    "ms": [1000 * (came - went) for went, came in zip(typed, echoes)],
    "echoes": echoes,
    "changes": changes,
}
if idle_s:
    time.sleep(1)
    for name in ("idle", "settled"):
        ticks, spent = cpu()
        time.sleep(idle_s)
        now, each = cpu()
        told[name + "_ticks"] = now - ticks
        # A thread that ended meanwhile had nothing to do.
        told[name + "_ms"] = sum(each[task] - spent.get(task, 0) for task in each) / 1e6
try:
    process.stdin.write(b".")
    process.stdin.flush()
    told["code"] = process.wait(ECHO_S)
except (OSError, subprocess.TimeoutExpired):
    process.kill()
    told["code"] = None
write(told)
sys.exit(0 if len(echoes) == count and not wrong and told["code"] == 0 else 1)
