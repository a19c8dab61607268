//! Validation of the address of a path's peer: challenges that are not answered yet, and answers to
//! be sent.
//!
//! ```text
//!  address is new ──▶ CHG ──▶ RSP from there ──▶ validated
//!  address moved  ──▶ CHG to both: the previous address answers ──▶ the path returns to it
//! ```
//!
//! Most paths are validated, and have no memory for this.

use std::net::SocketAddr;

use crate::link::Addresses;
use crate::path::{SessionPath, want};

/// The most outstanding challenges of a path. When there are more, the oldest is forgotten.
const CHALLENGE_NONCES_MAX: usize = 4;
/// The most answers to challenges that wait to be sent. Further challenges are dropped.
const ANSWERS_MAX: usize = 4;

/// A challenge sent to one address.
#[derive(Clone, Copy, Debug)]
struct Challenge {
    nonce: [u8; 16],
    remote: SocketAddr,
}

/// The address of a path before it moved. The path returns to it if that address answers.
#[derive(Clone, Copy, Debug)]
struct PreviousAddress {
    addresses: Addresses,
    /// Whether a challenge to the address has not been sent yet.
    ask: bool,
}

/// Challenges and answers of a path.
#[derive(Debug, Default)]
pub(crate) struct AddressValidation {
    challenges: Vec<Challenge>,
    /// Answers that wait to be sent, each with the address if that is not the path's own.
    answers: Vec<([u8; 16], Option<Addresses>)>,
    previous: Option<PreviousAddress>,
    /// The answer to the last challenge. It is repeated if it was lost, until AUTH arrives. Only a
    /// device sets it.
    answered: Option<[u8; 16]>,
}

impl AddressValidation {
    fn is_over(&self) -> bool {
        self.challenges.is_empty()
            && self.answers.is_empty()
            && self.previous.is_none()
            && self.answered.is_none()
    }
}

impl SessionPath {
    fn validation_mut(&mut self) -> &mut AddressValidation {
        self.validation.get_or_insert_default()
    }

    /// Challenges the peer at this path's current address.
    pub(crate) fn challenge(&mut self, nonce: [u8; 16]) {
        self.add_challenge(nonce, self.addresses.remote);
        self.wants |= want::CHG;
    }

    /// Records a challenge sent to an address; the oldest beyond the limit is forgotten.
    fn add_challenge(&mut self, nonce: [u8; 16], remote: SocketAddr) {
        let challenges = &mut self.validation_mut().challenges;
        if challenges.len() >= CHALLENGE_NONCES_MAX {
            challenges.remove(0);
        }
        challenges.push(Challenge { nonce, remote });
    }

    /// The challenge to send to the path's current address.
    pub(crate) fn challenge_here(&self) -> Option<[u8; 16]> {
        let mut sent = self.validation.as_ref()?.challenges.iter().rev();
        let here = sent.find(|c| c.remote == self.addresses.remote)?;
        Some(here.nonce)
    }

    /// Removes the challenge that an answer from `remote` repeats. False if none was sent there.
    pub(crate) fn take_challenge(&mut self, nonce: [u8; 16], remote: SocketAddr) -> bool {
        let Some(validation) = &mut self.validation else {
            return false;
        };
        let asked = |c: &Challenge| c.nonce == nonce && c.remote == remote;
        let at = validation.challenges.iter().position(asked);
        at.map(|at| validation.challenges.remove(at)).is_some()
    }

    /// Forgets all challenges, because the address was validated otherwise.
    pub(crate) fn forget_challenges(&mut self) {
        if let Some(validation) = &mut self.validation {
            validation.challenges.clear();
        }
    }

    /// R-PATH-3: records a challenge that arrived from `from`, to be answered.
    pub(crate) fn on_challenged(&mut self, nonce: [u8; 16], from: Addresses) {
        // An answer is valid only from the address that was challenged.
        let foreign = from.remote != self.addresses.remote || from.link != self.addresses.link;
        let answers = &mut self.validation_mut().answers;
        if answers.len() >= ANSWERS_MAX {
            return;
        }
        // R-PATH-2: one answer to an address that is not the path's, no larger than the
        // challenge's packet.
        if !foreign || answers.iter().all(|(_, at)| at.is_none()) {
            answers.push((nonce, foreign.then_some(from)));
        }
    }

    /// Whether an answer waits to be sent.
    pub(crate) fn has_answer(&self) -> bool {
        let validation = self.validation.as_ref();
        validation.is_some_and(|validation| !validation.answers.is_empty())
    }

    /// Takes the next answer to be sent.
    pub(crate) fn take_answer(&mut self) -> Option<[u8; 16]> {
        let answers = &mut self.validation.as_mut()?.answers;
        (!answers.is_empty()).then(|| answers.remove(0).0)
    }

    /// Takes an answer to be sent to an address that is not the path's.
    pub(crate) fn take_foreign_answer(&mut self) -> Option<([u8; 16], Addresses)> {
        let answers = &mut self.validation.as_mut()?.answers;
        let at = answers.iter().position(|(_, at)| at.is_some())?;
        let (nonce, to) = answers.remove(at);
        Some((nonce, to?))
    }

    /// The answer to the last challenge, until the server has reported that it arrived.
    pub(crate) fn answered(&self) -> Option<[u8; 16]> {
        self.validation.as_ref()?.answered
    }

    /// Records that a device sent an answer.
    pub(crate) fn note_answered(&mut self, nonce: [u8; 16]) {
        self.validation_mut().answered = Some(nonce);
    }

    /// R-PATH-13: records that the server accepts the address, so a lost answer need not be repeated.
    pub(crate) fn on_accepted(&mut self) {
        if let Some(validation) = &mut self.validation {
            validation.answered = None;
        }
    }

    /// Remembers the path's address before it moves.
    pub(crate) fn note_previous_address(&mut self) {
        self.validation_mut().previous = Some(PreviousAddress {
            addresses: self.addresses,
            ask: true,
        });
    }

    /// The previous address, if it must be challenged. It is returned once.
    pub(crate) fn previous_to_ask(&mut self) -> Option<Addresses> {
        let previous = self.validation.as_mut()?.previous.as_mut()?;
        std::mem::take(&mut previous.ask).then_some(previous.addresses)
    }

    /// Challenges the peer at the path's previous address.
    pub(crate) fn challenge_previous(&mut self, nonce: [u8; 16], at: Addresses) {
        self.add_challenge(nonce, at.remote);
    }

    /// Takes the previous address if it is `remote`, which has answered.
    pub(crate) fn take_previous_at(&mut self, remote: SocketAddr) -> Option<Addresses> {
        let validation = self.validation.as_mut()?;
        let previous = validation
            .previous
            .take_if(|p| p.addresses.remote == remote)?;
        Some(previous.addresses)
    }

    /// Frees memory that only a validation needs.
    pub(crate) fn shrink_validation(&mut self) {
        self.validation.take_if(|validation| validation.is_over());
    }
}
