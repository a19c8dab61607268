//! Violations of the recovery contract in an interrupted transfer.

/// The violations that were found; empty if the contract held.
#[derive(Clone, Debug, Default)]
pub struct ContractViolations {
    /// Whether the fault occurred before the transfer was over.
    pub struck: bool,
    /// R1, R2, R5: bytes that are wrong or lost, or a transfer that does not end.
    pub lost: Vec<String>,
    /// R2: durable bytes that were received or requested again.
    pub repeated: Vec<String>,
    /// R3, R4 and output: an epoch used twice, a missing reason, a panic, a repeated sync.
    pub wrong: Vec<String>,
}

impl ContractViolations {
    /// Whether there are no violations.
    pub fn holds(&self) -> bool {
        self.lost.is_empty() && self.repeated.is_empty() && self.wrong.is_empty()
    }

    /// Every violation in one line.
    pub fn words(&self) -> String {
        let named = |what: &'static str, found: &[String]| {
            found
                .iter()
                .map(|text| format!("{what}: {text}"))
                .collect::<Vec<_>>()
        };
        [
            named("lost", &self.lost),
            named("repeated", &self.repeated),
            named("wrong", &self.wrong),
        ]
        .concat()
        .join("; ")
    }
}
