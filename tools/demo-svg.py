#!/usr/bin/env python3
"""Records a run of `cedos demo` on a terminal and draws it as an animated SVG.

    cargo build --release && tools/demo-svg.py > docs/demo.svg

An argument names another program than target/release/cedos. The picture shows what the program printed,
at the times at which it did; only the pause after the end is added.
"""

import codecs
import fcntl
import html
import os
import pty
import re
import select
import struct
import sys
import termios
import time

COLUMNS, ROWS = 108, 48
# Between two pictures of lines that change all the time.
STEP_S = 0.5
# The last picture stays this long before the recording begins again.
REST_S = 8.0
CHAR_PX, LINE_PX, MARGIN_PX = 7.2, 17, 12

# Lines with these words stand out.
COLOURS = [("LOST", ' fill="#f99"'), ("MISSED", ' fill="#f99"'), ("  D2TP:", ' fill="#9d9"')]

CONTROL = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")


class Screen:
    """What a terminal shows: enough of one for lines, progress bars and their removal."""

    def __init__(self):
        self.lines = [""] * ROWS
        self.row = self.column = 0
        self.rest = ""

    def feed(self, text):
        text, self.rest = self.rest + text, ""
        at = 0
        while at < len(text):
            char = text[at]
            if char == "\x1b":
                found = CONTROL.match(text, at)
                if not found:
                    self.rest = text[at:]
                    return
                self.control(found.group(1), found.group(2))
                at = found.end()
                continue
            if char == "\r":
                self.column = 0
            elif char == "\n":
                self.row = min(self.row + 1, ROWS - 1)
            elif char >= " ":
                if self.column == COLUMNS:
                    self.row, self.column = min(self.row + 1, ROWS - 1), 0
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + char + line[self.column + 1 :]
                self.column += 1
            at += 1

    def control(self, numbers, command):
        count = int(numbers) if numbers.isdigit() else 1
        if command == "A":
            self.row = max(self.row - count, 0)
        elif command == "B":
            self.row = min(self.row + count, ROWS - 1)
        elif command == "G":
            self.column = count - 1
        elif command == "K":
            line = self.lines[self.row]
            self.lines[self.row] = "" if numbers == "2" else line[: self.column]
        elif command == "J":
            self.lines[self.row] = self.lines[self.row][: self.column]
            self.lines[self.row + 1 :] = [""] * (ROWS - self.row - 1)


def record(program):
    """The pictures of a run, as (seconds, lines)."""
    child, terminal = pty.fork()
    if child == 0:
        os.execv(program, [program, "demo"])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    screen, pictures, begun = Screen(), [], time.monotonic()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    last = 0.0
    while True:
        ready, _, _ = select.select([terminal], [], [], 0.05)
        now = time.monotonic() - begun
        if ready:
            try:
                data = os.read(terminal, 65536)
            except OSError:
                data = b""
            if not data:
                break
            screen.feed(decoder.decode(data))
        if now - last >= STEP_S or not pictures:
            pictures.append((now, [line.rstrip() for line in screen.lines]))
            last = now
    _, status = os.waitpid(child, 0)
    if status != 0:
        sys.exit("the demonstration failed; its output is not worth a picture")
    pictures.append((time.monotonic() - begun, [line.rstrip() for line in screen.lines]))
    return pictures


def spans(pictures, end):
    """Which text stands in which row, and from when until when."""
    for row in range(ROWS):
        text, since = "", 0.0
        for at, lines in pictures:
            if lines[row] != text:
                if text:
                    yield row, text, since, at
                text, since = lines[row], at
        if text:
            yield row, text, since, end


def draw(pictures):
    end = pictures[-1][0] + REST_S
    shown = list(spans(pictures, end))
    height = (max(row for row, *_ in shown) + 1) * LINE_PX + 2 * MARGIN_PX
    width = COLUMNS * CHAR_PX + 2 * MARGIN_PX
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'font-family="ui-monospace,Menlo,Consolas,monospace" font-size="12" fill="#ddd" '
        'xml:space="preserve">'
    )
    clock = f'<animate id="run" attributeName="x" from="0" to="0" dur="{end:.1f}s" begin="0s;run.end"/>'
    yield f'<rect width="100%" height="100%" rx="6" fill="#1b1e24">{clock}</rect>'
    for row, text, since, until in shown:
        y = MARGIN_PX + (row + 1) * LINE_PX - 5
        words = html.escape(text, quote=False)
        colour = next((fill for word, fill in COLOURS if word in text), "")
        # Where nothing moves, the last picture is seen.
        stays = until == end
        hidden = "" if stays else ' visibility="hidden"'
        if stays:
            change = f'to="hidden" begin="run.begin" dur="{max(since, 0.01):.1f}s"'
        else:
            change = f'to="visible" begin="run.begin+{since:.1f}s" dur="{until - since:.1f}s"'
        yield (
            f'<text x="{MARGIN_PX}" y="{y}"{colour}{hidden}>{words}'
            f'<set attributeName="visibility" {change}/></text>'
        )
    yield "</svg>"


if __name__ == "__main__":
    print("\n".join(draw(record(sys.argv[1] if len(sys.argv) > 1 else "target/release/cedos"))))
