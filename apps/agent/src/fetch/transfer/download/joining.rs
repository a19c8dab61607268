//! Whether an answer's bytes may be joined to those held: the one place that decides it.
//!
//! The strong validator must be the same, the length too, and the last bytes held must come again
//! equal. Otherwise the download starts from zero, a bounded number of times, and says so.

use super::Download;
use crate::fetch::dial::FetchFault;
use crate::fetch::exchange::{ContentPart, FetchResponse, GetRequest};
use crate::fetch::outcome::{TransferExit, TransferFailure, TransferReason};
use crate::fetch::report::human_bytes;
use crate::fetch::transfer::control::TransferControl;

/// Restarts from zero before the origin counts as unusable: each costs a whole object at worst.
const RESTARTS_MAX: u32 = 5; // a guess

impl Download {
    /// Checks whether the answer's bytes may be joined to those held. Returns the overlap that must
    /// arrive first, or nothing if another request is needed.
    pub(super) async fn join(
        &mut self,
        answer: &FetchResponse,
        ask: &GetRequest,
        control: &mut TransferControl<'_>,
    ) -> Result<Option<Vec<u8>>, FetchFault> {
        if answer.encoding.is_some() && !self.said_encoding {
            self.said_encoding = true;
            let coding = answer.encoding.clone().unwrap_or_default();
            let text = format!(
                "the server sends it {coding}-encoded although not asked; it is stored as it is"
            );
            control.reporter.note(None, text);
        }
        self.encoding.clone_from(&answer.encoding);
        self.offered_name.clone_from(&answer.name);
        self.version.clone_from(&answer.version);
        let held = self.sink.held_bytes();
        match answer.part {
            ContentPart::Whole(length) => {
                let overlap = self.join_whole(answer, ask, length, control).await?;
                Ok(Some(overlap))
            }
            // Also what an origin that sends a range nobody asked for means.
            ContentPart::Range { from: 0, total, .. } => {
                let overlap = self.join_whole(answer, ask, total, control).await?;
                Ok(Some(overlap))
            }
            ContentPart::Range { from, total, .. } => {
                let note = &self.sink.note;
                let same_length =
                    held == 0 || total.is_none() || note.length.is_none() || total == note.length;
                let same_validator =
                    held == 0 || answer.validator.is_none() || answer.validator == note.validator;
                if !same_length || !same_validator {
                    let what = if same_length { "validator" } else { "length" };
                    self.distrust = Some(format!("the object's {what} has changed"));
                    return Ok(None);
                }
                if held == 0 {
                    self.sink.note.validator = answer.validator.clone();
                }
                self.sink.note.length = total.or(self.sink.note.length);
                let overlap = (held - from) as usize;
                let tail = self.sink.tail();
                Ok(Some(tail[tail.len() - overlap..].to_vec()))
            }
            ContentPart::NotModified => {
                self.is_unchanged = true;
                Ok(Some(Vec::new()))
            }
            ContentPart::Unsatisfiable(_) => {
                if held == 0 {
                    self.ranges_refused = true; // an empty object has no first byte to ask for
                } else {
                    self.distrust =
                        Some("the object is shorter than what was received before".into());
                }
                Ok(None)
            }
        }
    }

    /// Joins an answer with the whole object. The bytes held are kept only if they are so few that all
    /// can be compared, and the validator is the same.
    async fn join_whole(
        &mut self,
        answer: &FetchResponse,
        ask: &GetRequest,
        length: Option<u64>,
        control: &mut TransferControl<'_>,
    ) -> Result<Vec<u8>, FetchFault> {
        let held = self.sink.held_bytes();
        self.ranges_refused |= ask.to.is_some() && matches!(answer.part, ContentPart::Whole(_));
        let known = &self.sink.note.validator;
        let known_length = self.sink.note.length;
        let same_length = length.is_none() || known_length.is_none() || length == known_length;
        let same =
            known.is_some() && *known == answer.validator && same_length && self.distrust.is_none();
        let comparable = same && held == self.sink.tail().len() as u64;
        if held > 0 && !comparable {
            let why = self
                .distrust
                .take()
                .unwrap_or_else(|| self.why_from_zero(answer));
            let restarted = self.restart(&why, control).await;
            restarted.map_err(FetchFault::Final)?;
        }
        self.distrust = None;
        self.sink.note.length = length;
        self.sink.note.validator = answer.validator.clone();
        Ok(self.sink.tail().to_vec())
    }

    fn why_from_zero(&self, answer: &FetchResponse) -> String {
        match &self.sink.note.validator {
            None => "the server does not say whether the content is still the same (no strong ETag, no old \
                     enough Last-Modified)"
                .into(),
            Some(known) if answer.validator.as_ref() == Some(known) => {
                "the server does not send parts of an object".into()
            }
            Some(_) => "the server has another object now".into(),
        }
    }

    async fn restart(
        &mut self,
        why: &str,
        control: &mut TransferControl<'_>,
    ) -> Result<(), TransferFailure> {
        let changed = |text: String| {
            let (exit, reason) = (TransferExit::OriginChanged, TransferReason::OriginChanged);
            TransferFailure::of(exit, reason, text)
        };
        let held = self.sink.held_bytes();
        self.restarts += 1;
        if self.restarts > RESTARTS_MAX {
            let text = format!("{why}; gave up after starting from zero {RESTARTS_MAX} times");
            return Err(changed(text));
        }
        if !self.sink.restart().await? {
            let text = format!(
                "{why}, and {} were already written to standard output; use -o FILE",
                human_bytes(held)
            );
            return Err(changed(text));
        }
        self.duplicate_bytes += held;
        let discarded = human_bytes(held);
        let text = format!("{why}: starting from zero, {discarded} discarded");
        control
            .reporter
            .note(Some(TransferReason::OriginChanged), text);
        Ok(())
    }
}
