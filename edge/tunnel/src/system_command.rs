//! Changes of routes, rules and packet filters, by the system's own programs: `ip` and `nft`.

use std::io::{self, Write};
use std::process::{Command, Stdio};

/// Why a change of the system's network settings failed.
#[derive(Debug, thiserror::Error)]
pub enum SystemCommandError {
    /// The program cannot be run.
    #[error("cannot run `{program}`: {cause}; install the package {package}")]
    Missing {
        /// The name of the program.
        program: &'static str,
        /// The package that has it.
        package: &'static str,
        /// The system's error.
        cause: io::Error,
    },
    /// The program refused.
    #[error("`{program}` failed: {text}")]
    Refused {
        /// The name of the program.
        program: &'static str,
        /// The command's error output, on one line.
        text: String,
    },
}

/// Runs `ip -batch` with these lines, for one family of addresses; they stop at the first that fails.
///
/// # Errors
/// `ip` is missing, or refuses a line.
pub fn ip_batch(is_ipv6: bool, lines: &str) -> Result<(), SystemCommandError> {
    let family = if is_ipv6 { "-6" } else { "-4" };
    run_command("ip", "iproute2", &[family, "-batch", "-"], lines).map(drop)
}

/// Hands a script to `nft`, all or nothing of which takes effect.
///
/// # Errors
/// `nft` is missing, or refuses the script.
pub fn nft(script: &str) -> Result<(), SystemCommandError> {
    run_command("nft", "nftables", &["-f", "-"], script).map(drop)
}

/// Runs a program with this input, and returns its output.
///
/// # Errors
/// It cannot be run, or fails.
pub fn run_command(
    program: &'static str,
    package: &'static str,
    arguments: &[&str],
    input: &str,
) -> Result<String, SystemCommandError> {
    let missing = |cause| SystemCommandError::Missing {
        program,
        package,
        cause,
    };
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(missing)?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that ends before it has read all says why on its standard error.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child.wait_with_output().map_err(missing)?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = errors.lines().map(str::trim).collect();
    Err(SystemCommandError::Refused {
        program,
        text: match lines.is_empty() {
            true => output.status.to_string(),
            false => lines.join(" "),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_fails_or_is_missing_is_told_in_a_sentence() {
        let failed = run_command("sh", "dash", &["-c", "echo no >&2; exit 3"], "").unwrap_err();
        assert_eq!(failed.to_string(), "`sh` failed: no");
        let missing = run_command("no-such-program", "nothing", &[], "").unwrap_err();
        assert!(missing.to_string().contains("install the package nothing"));
        assert_eq!(run_command("cat", "coreutils", &[], "x").unwrap(), "x");
    }
}
