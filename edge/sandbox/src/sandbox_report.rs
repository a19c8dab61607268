//! Which parts of a sandbox hold, in words.

use std::fmt;

/// Whether a part holds; if not, why.
pub type SandboxPart = Result<(), String>;

/// Which parts of a sandbox hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SandboxReport {
    /// Programs that it starts gain no rights (`no_new_privs`).
    pub no_new_privs: SandboxPart,
    /// Capabilities are dropped.
    pub capabilities: SandboxPart,
    /// Files are restricted by Landlock.
    pub files: SandboxPart,
    /// System calls are restricted by seccomp.
    pub calls: SandboxPart,
}

impl SandboxReport {
    /// Whether all parts hold.
    pub fn is_whole(&self) -> bool {
        self.missing().next().is_none()
    }

    /// The parts that do not hold, each with the reason.
    pub fn missing(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let parts = [
            ("no_new_privs", &self.no_new_privs),
            ("capabilities", &self.capabilities),
            ("files", &self.files),
            ("system calls", &self.calls),
        ];
        parts
            .into_iter()
            .filter_map(|(name, part)| Some((name, part.as_ref().err()?.as_str())))
    }
}

impl fmt::Display for SandboxReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_whole() {
            return f.write_str("files, system calls and capabilities are restricted");
        }
        for (n, (part, reason)) in self.missing().enumerate() {
            let comma = if n > 0 { "; " } else { "" };
            write!(f, "{comma}{part} are not restricted: {reason}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_names_the_part_that_does_not_hold_and_why() {
        let whole = SandboxReport {
            no_new_privs: Ok(()),
            capabilities: Ok(()),
            files: Ok(()),
            calls: Ok(()),
        };
        assert!(whole.is_whole());
        let partial = SandboxReport {
            files: Err("this kernel has no Landlock".to_owned()),
            ..whole
        };
        assert!(!partial.is_whole());
        assert_eq!(
            partial.to_string(),
            "files are not restricted: this kernel has no Landlock"
        );
    }
}
