//! The selection of the mode that catches a program: the lowest rung that works.
//!
//! | rung | catches | does not |
//! |---|---|---|
//! | environment | programs known to heed `http_proxy` and the like | what they do besides |
//! | preload | programs that load the C library, and what they start: of that, static and Go programs as notify does | the program itself, if it is static or of Go |
//! | notify | whatever calls `connect`, and every socket for datagrams, so every name lookup | what began without the filter |
//! | tun | everything, in a network namespace of its own | |

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::str::FromStr;

use d2tp_catch::{Executable, ExecutableKind};

/// A way of catching connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CaptureMode {
    /// Variables that name a proxy.
    Environment,
    /// A library that is preloaded by LD_PRELOAD.
    Preload,
    /// seccomp user notification.
    Notify,
    /// A network namespace with a TUN.
    Tun,
}

impl CaptureMode {
    /// Every mode, the least intrusive first.
    pub const ALL: [CaptureMode; 4] = [
        CaptureMode::Environment,
        CaptureMode::Preload,
        CaptureMode::Notify,
        CaptureMode::Tun,
    ];

    /// The name that people write, such as `preload`.
    pub fn as_str(self) -> &'static str {
        match self {
            CaptureMode::Environment => "env",
            CaptureMode::Preload => "preload",
            CaptureMode::Notify => "notify",
            CaptureMode::Tun => "tun",
        }
    }
}

impl fmt::Display for CaptureMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for CaptureMode {
    type Err = String;
    fn from_str(text: &str) -> Result<CaptureMode, String> {
        let found = CaptureMode::ALL
            .into_iter()
            .find(|mode| mode.as_str() == text);
        found.ok_or_else(|| format!("`{text}` is not one of env, preload, notify, tun"))
    }
}

/// A capture mode, and why it was chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CaptureChoice {
    /// The chosen mode.
    pub mode: CaptureMode,
    /// The reason for the mode, for people.
    pub reason: String,
}

/// Programs that heed the variables for all they fetch, and their options that have them not to.
const HEEDS: [(&str, &[&str]); 3] = [
    (
        "curl",
        &[
            "--noproxy",
            "-x",
            "--proxy",
            "--preproxy",
            "--interface",
            "-q",
            "-K",
            "--config",
        ],
    ),
    (
        "wget",
        &[
            "--no-proxy",
            "-e",
            "--execute",
            "--config",
            "-i",
            "--input-file",
        ],
    ),
    ("git", &["-c", "--config", "--config-env"]),
];

/// Chooses the capture mode for a program with these arguments. `listens`: the program is to be a
/// server.
pub fn choose(program: &Executable, words: &[OsString], listens: bool) -> CaptureChoice {
    let name = program.name();
    let chosen = |mode, because: String| CaptureChoice {
        mode,
        reason: because,
    };
    match program.kind {
        _ if !listens && heeds(&name, &words[1..]) => {
            let because = format!("{name} uses proxy variables");
            chosen(CaptureMode::Environment, because)
        }
        ExecutableKind::Dynamic => {
            chosen(CaptureMode::Preload, format!("{name} loads the C library"))
        }
        ExecutableKind::Go => chosen(CaptureMode::Notify, format!("{name} is a Go program")),
        ExecutableKind::Static if listens => {
            chosen(CaptureMode::Notify, format!("{name} is a static program"))
        }
        ExecutableKind::Static => chosen(
            CaptureMode::Tun,
            format!("{name} is a static program that resolves names by itself"),
        ),
        ExecutableKind::Privileged => chosen(
            CaptureMode::Tun,
            format!("{name} runs with other privileges, so no library can be preloaded"),
        ),
    }
}

fn heeds(name: &str, words: &[OsString]) -> bool {
    let Some((_, against)) = HEEDS.iter().find(|(known, _)| *known == name) else {
        return false;
    };
    let is = |word: &OsStr, option: &str| {
        let word = word.as_encoded_bytes();
        let option = option.as_bytes();
        word == option
            || word.starts_with(option)
                && (!option.starts_with(b"--") || word.get(option.len()) == Some(&b'='))
    };
    let mut urls = 0;
    for word in words {
        if against.iter().any(|option| is(word, option)) {
            return false;
        }
        let text = word.to_string_lossy();
        let Some((scheme, _)) = text.split_once("://") else {
            continue;
        };
        match scheme {
            "http" | "https" => urls += 1,
            // Something else than the variables speak of.
            _ => return false,
        }
    }
    // `git fetch origin` may go by ssh, and curl takes an address without a scheme.
    urls > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(name: &str, kind: ExecutableKind) -> Executable {
        let path = std::path::PathBuf::from("/usr/bin").join(name);
        Executable {
            runs: path.clone(),
            path,
            kind,
        }
    }

    fn mode(text: &str, kind: ExecutableKind) -> CaptureMode {
        let words: Vec<OsString> = text.split(' ').map(OsString::from).collect();
        let name = words[0].to_str().unwrap();
        choose(&program(name, kind), &words, false).mode
    }

    #[test]
    fn the_first_mode_that_catches_the_program_is_taken() {
        let cases = [
            (
                "curl -sO https://o.example/a",
                ExecutableKind::Dynamic,
                CaptureMode::Environment,
            ),
            (
                "curl -x other https://o.example/a",
                ExecutableKind::Dynamic,
                CaptureMode::Preload,
            ),
            (
                "curl --noproxy=* https://o.example/a",
                ExecutableKind::Dynamic,
                CaptureMode::Preload,
            ),
            (
                "curl sftp://o.example/a",
                ExecutableKind::Dynamic,
                CaptureMode::Preload,
            ),
            (
                "curl o.example",
                ExecutableKind::Dynamic,
                CaptureMode::Preload,
            ),
            (
                "git clone https://o.example/a",
                ExecutableKind::Dynamic,
                CaptureMode::Environment,
            ),
            (
                "git fetch origin",
                ExecutableKind::Dynamic,
                CaptureMode::Preload,
            ),
            (
                "git clone ssh://o.example/a",
                ExecutableKind::Dynamic,
                CaptureMode::Preload,
            ),
            (
                "ssh o.example",
                ExecutableKind::Dynamic,
                CaptureMode::Preload,
            ),
            ("go-program x", ExecutableKind::Go, CaptureMode::Notify),
            ("busybox wget", ExecutableKind::Static, CaptureMode::Tun),
            (
                "ping o.example",
                ExecutableKind::Privileged,
                CaptureMode::Tun,
            ),
        ];
        for (text, kind, wanted) in cases {
            assert_eq!(mode(text, kind), wanted, "{text}");
        }
    }

    #[test]
    fn a_server_is_not_caught_by_variables() {
        let words = ["curl".into(), "https://o.example".into()];
        let chosen = choose(&program("curl", ExecutableKind::Dynamic), &words, true);
        assert_eq!(chosen.mode, CaptureMode::Preload);
        for mode in CaptureMode::ALL {
            assert_eq!(mode.as_str().parse(), Ok(mode));
        }
    }
}
