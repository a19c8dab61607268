//! Standard output, standard error and the log: all text of the program passes through this crate.
//!
//! Printed text may contain text of a proxy, a peer or an origin, or a file name, so every control
//! character is escaped ([`cedos_text`]). In JSON the result is the same string.
//!
//! ```text
//!  print_stdout ─ written ──▶ reader
//!               ─ closed pipe ──▶ nothing more is printed; the verb's exit code stays
//!               ─ full disk ────▶ nothing more is printed; the verb ends with an error
//! ```
//!
//! Rust programs ignore SIGPIPE, and `println!` panics instead. A transfer must not fail because
//! the reader of its progress has gone, so a closed pipe is no error here. Code that only prints
//! checks [`is_stdout_closed`].

use std::io::{self, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cedos_text::escape_controls;

/// Why nothing more is written to standard output.
#[derive(Debug, Clone, PartialEq, Eq)]
struct StdoutFailure {
    kind: io::ErrorKind,
    text: String,
}

static STDOUT_FAILURE: Mutex<Option<StdoutFailure>> = Mutex::new(None);

fn stdout_failure() -> MutexGuard<'static, Option<StdoutFailure>> {
    STDOUT_FAILURE
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

/// Prints text and a line break on standard output. After the first error nothing more is printed;
/// [`stdout_result`] returns that error.
pub fn print_stdout(text: &str) {
    keep_failure(|| print(&mut io::stdout(), text));
}

/// Prints lines on standard output in white on black, whatever the terminal's own colours are.
pub fn print_stdout_white_on_black(text: &str) {
    keep_failure(|| print_white_on_black(&mut io::stdout(), text));
}

/// Writes to standard output unless that failed before.
fn keep_failure(write: impl FnOnce() -> io::Result<()>) {
    let mut failure = stdout_failure();
    if failure.is_none()
        && let Err(error) = write()
    {
        *failure = Some(StdoutFailure {
            kind: error.kind(),
            text: error.to_string(),
        });
    }
}

/// Prints text and a line break on standard error. Errors are ignored, because they could not be
/// shown. The error numbers that [`io::Error`] adds to the system's messages are omitted.
pub fn print_stderr(text: &str) {
    let _ = print(&mut io::stderr(), &without_error_numbers(text));
}

/// Text without ` (os error 2)` and the like, which [`print_stderr`] omits by itself.
pub fn without_error_numbers(text: &str) -> String {
    const BEFORE: &str = " (os error ";
    let mut kept = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find(BEFORE) {
        let number = &rest[start + BEFORE.len()..];
        let digits = number.bytes().take_while(u8::is_ascii_digit).count();
        kept += &rest[..start];
        match number[digits..].strip_prefix(')') {
            Some(after) if digits > 0 => rest = after,
            _ => {
                kept += BEFORE;
                rest = number;
            }
        }
    }
    kept + rest
}

fn print(to: &mut impl Write, text: &str) -> io::Result<()> {
    // A single write, so that lines of two processes do not mix.
    let line = format!("{}\n", escape_controls(text));
    to.write_all(line.as_bytes())?;
    to.flush()
}

fn print_white_on_black(to: &mut impl Write, text: &str) -> io::Result<()> {
    // ECMA-48, SGR: 97 and 40 are bright white on black, 0 is as before.
    let lines: String = text
        .lines()
        .map(|line| format!("\x1b[97;40m{}\x1b[0m\n", escape_controls(line)))
        .collect();
    to.write_all(lines.as_bytes())?;
    to.flush()
}

/// Whether printed text reaches no reader any more: the reader is gone, or the disk is full.
pub fn is_stdout_closed() -> bool {
    stdout_failure().is_some()
}

/// Whether everything printed was written. A reader that has gone is no error.
///
/// # Errors
/// The first error of standard output.
pub fn stdout_result() -> io::Result<()> {
    match &*stdout_failure() {
        Some(failure) if failure.kind != io::ErrorKind::BrokenPipe => {
            let text = format!("cannot write to standard output: {}", failure.text);
            Err(io::Error::new(failure.kind, text))
        }
        _ => Ok(()),
    }
}

/// Standard error for a log: each write is one entry, and becomes one line.
#[derive(Debug, Clone, Copy, Default)]
pub struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, entry: &[u8]) -> io::Result<usize> {
        let _ = print(&mut io::stderr(), &log_line(entry));
        Ok(entry.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An entry of a log on one line, so that no text in it can look like the next entry.
fn log_line(entry: &[u8]) -> String {
    let entry = String::from_utf8_lossy(entry);
    entry.trim_end_matches('\n').replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_printed_without_the_controls_of_its_words() {
        let mut out = Vec::new();
        print(&mut out, "he said \x1b[31m\u{202e}red\r").unwrap();
        assert_eq!(out, b"he said \\u001b[31m\\u202ered\\u000d\n");
    }

    #[test]
    fn colours_reach_the_terminal_and_those_of_the_text_do_not() {
        let mut out = Vec::new();
        print_white_on_black(&mut out, "one\ntwo \x1b[31m").unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(
            text,
            "\x1b[97;40mone\x1b[0m\n\x1b[97;40mtwo \\u001b[31m\x1b[0m\n"
        );
    }

    #[test]
    fn json_that_is_printed_has_the_same_meaning() {
        let value = serde_json::json!({"text": "\u{9b}31m \x1b \u{202e} \u{e0041} \u{7f}"});
        let mut out = Vec::new();
        print(&mut out, &value.to_string()).unwrap();
        let line = std::str::from_utf8(&out).unwrap();
        assert!(line.trim_end().chars().all(|c| !cedos_text::is_control(c)));
        let read: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!(read, value);
    }

    #[test]
    fn people_are_not_told_the_numbers_of_the_systems_errors() {
        for (said, shown) in [
            ("a: No such file (os error 2)", "a: No such file"),
            (
                "a: no (os error 2); b: no (os error 13): c",
                "a: no; b: no: c",
            ),
            ("a (os error x) (os error", "a (os error x) (os error"),
        ] {
            assert_eq!(without_error_numbers(said), shown);
        }
    }

    #[test]
    fn an_entry_of_a_log_is_one_line() {
        let entry = b"INFO closed text=one\nINFO forged\n";
        assert_eq!(log_line(entry), "INFO closed text=one\\nINFO forged");
    }
}
