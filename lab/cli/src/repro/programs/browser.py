"""A download by Chromium without a window: BROWSER URL FOLDER OUT.

Chromium is driven over its DevTools pipe: it reads commands from descriptor 3 and writes events to 4,
JSON closed by a zero byte. Exit code 0: it says that the download is complete, and OUT has it. 1: it gave
the download up and did not go on with it by itself.
"""

import json
import os
import select
import subprocess
import sys
import tempfile
import time

# Chromium goes on with some broken downloads by itself; after so long without, it has given up.
GOES_ON_S = 20

browser, url, folder, out = sys.argv[1:]
here_in, its_out = os.pipe()
its_in, here_out = os.pipe()


def give_pipes():
    os.dup2(its_in, 13)
    os.dup2(its_out, 14)
    os.dup2(13, 3)
    os.dup2(14, 4)


downloads = tempfile.mkdtemp(dir=folder)
process = subprocess.Popen(
    [
        browser,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--user-data-dir=" + os.path.join(folder, "profile"),
        "--remote-debugging-pipe",
    ],
    preexec_fn=give_pipes,
    close_fds=False,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
)
os.close(its_in)
os.close(its_out)
number = 0


def ask(method, **params):
    global number
    number += 1
    os.write(here_out, json.dumps({"id": number, "method": method, "params": params}).encode() + b"\0")


ask("Browser.setDownloadBehavior", behavior="allow", downloadPath=downloads, eventsEnabled=True)
ask("Target.createTarget", url=url)

pending, broken, name, code = b"", None, None, None
while code is None:
    if select.select([here_in], [], [], 0.2)[0]:
        read = os.read(here_in, 1 << 16)
        if not read:
            code = 1
        pending += read
    *whole, pending = pending.split(b"\0")
    for event in map(json.loads, whole):
        params = event.get("params", {})
        if event.get("method") == "Browser.downloadWillBegin":
            name = params.get("suggestedFilename")
        if event.get("method") == "Browser.downloadProgress":
            state = params.get("state")
            if state == "completed":
                code = 0
            broken = (broken or time.monotonic()) if state == "canceled" else None
    if broken is not None and time.monotonic() - broken > GOES_ON_S:
        code = 1
if code == 0:
    os.replace(os.path.join(downloads, name), out)
process.terminate()
process.wait()
sys.exit(code)
