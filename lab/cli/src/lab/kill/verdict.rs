//! What is wrong with a transfer that was struck.

/// What was found. Nothing, if the contract held.
#[derive(Clone, Debug, Default)]
pub struct ContractViolations {
    /// The blow fell before the transfer was over.
    pub struck: bool,
    /// R1, R2, R5: bytes that are wrong or gone, a transfer that does not end.
    pub lost: Vec<String>,
    /// R2: bytes that were safe and came, or were asked for, again.
    pub repeated: Vec<String>,
    /// R3, R4 and the words: an epoch twice, no reason given, a panic, a sync repeated.
    pub wrong: Vec<String>,
}

impl ContractViolations {
    /// Whether nothing is wrong.
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
