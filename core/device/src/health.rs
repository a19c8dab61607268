//! Whether a link answers, judged by packets sent over it, its carrier, its first hop and its
//! radio.
//!
//! ```text
//!             first path opened                   no answer for 1 s
//!  Unasked ──────────────────────▶ Asked ───────────────────────────────▶ Silent
//!                                  │   ▲                                    │
//!                  something heard │   │ its paths fell silent              │ something heard:
//!                                  ▼   │ (2 probe timeouts)                 │ it is back
//!                               Answering ◀─────────────────────────────────┘
//!
//!  Asked after it had answered: Silent when nothing was received for half a second
//!
//!  200 ms of silence (PathQuiet) ─┐
//!  the radio's counters ──────────┴▶ AskFirstHop ─▶ on_hop_answer ─▶ FirstHopSaid
//!
//!  carrier lost, same addresses ──▶ Freeze ── it is back within 30 s ──▶ Unfreeze
//!                                         └── it is not ──▶ the link is lost like any other
//! ```
//!
//! The silence of a first hop means nothing unless it has answered before on this attachment. Each
//! first hop is therefore asked once when the path of its link comes up.

use d2tp_session::{FirstHopStatus, LinkId, PathState, PathStats};
use d2tp_time::{Span, Time};

/// How long a link without a carrier keeps its paths. After a longer absence it is treated as
/// another network.
pub(crate) const CARRIER_LOST_MAX: Span = Span::from_secs(30); // a guess
/// How long the first answer over a link may take before the link counts as silent.
pub(crate) const FIRST_ANSWER_MAX: Span = Span::from_secs(1); // a guess: a SYN, its repetition, and a slow radio
/// How long a link that answered before may receive nothing, although packets that need an answer
/// were sent, until it counts as silent. With a lower value a radio that scans or changes its
/// access point counts as lost, and metered links are used instead. With a higher value a flow
/// stands still for longer.
pub(crate) const SILENCE_MIN: Span = Span::from_millis(500); // a guess: a scan of Wi-Fi takes 0.1 to 0.3 s

/// Whether packets sent over a link are answered. Having an address proves nothing: an access point may
/// assign one and carry nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkAnswers {
    /// Nothing is sent over the link: it has no path, or it is frozen.
    Unasked,
    /// An answer is awaited, the first one or after a silence.
    Asked {
        /// When the oldest unanswered packet was sent, or a packet last arrived.
        since: Time,
        /// When the link counts as silent if nothing arrives before.
        until: Time,
    },
    /// The last packet was answered: the link is up.
    Answering,
    /// Packets were not answered: the link is down, whatever addresses it has.
    Silent {
        /// Since when nothing has arrived.
        since: Time,
    },
}

impl LinkAnswers {
    /// Whether the link counts as up: a path over it has answered.
    pub fn is_up(self) -> bool {
        self == LinkAnswers::Answering
    }

    /// Whether the link counts as down although it has an address: packets sent were not answered.
    pub fn is_silent(self) -> bool {
        matches!(self, LinkAnswers::Silent { .. })
    }

    /// The next state, from the link's paths. `opened`: when its first socket was opened; `slack`: how much
    /// longer than on most links an answer may take.
    pub(crate) fn next(
        self,
        now: Time,
        opened: Time,
        slack: Span,
        sockets: &[LinkId],
        paths: &[PathStats],
    ) -> LinkAnswers {
        let mine = || paths.iter().filter(|p| sockets.contains(&p.addresses.link));
        if sockets.is_empty() && !self.is_silent() {
            return LinkAnswers::Unasked;
        }
        if mine().any(|p| p.state == PathState::Active) {
            return LinkAnswers::Answering;
        }
        let asked = match self {
            LinkAnswers::Unasked => LinkAnswers::Asked {
                since: opened,
                until: opened + FIRST_ANSWER_MAX + slack,
            },
            // The link had answered, and now its paths fell silent or failed.
            LinkAnswers::Answering => {
                let since = mine().map(|p| p.heard_at).max().unwrap_or(now);
                LinkAnswers::Asked {
                    since,
                    until: since + SILENCE_MIN + slack,
                }
            }
            LinkAnswers::Asked { .. } | LinkAnswers::Silent { .. } => self,
        };
        match asked {
            LinkAnswers::Asked { since, until } if until <= now => LinkAnswers::Silent { since },
            asked => asked,
        }
    }

    /// Since when nothing was heard on the link although it was asked.
    pub(crate) fn unanswered_since(self) -> Option<Time> {
        match self {
            LinkAnswers::Asked { since, .. } | LinkAnswers::Silent { since } => Some(since),
            LinkAnswers::Unasked | LinkAnswers::Answering => None,
        }
    }

    /// When the link counts as silent, if nothing arrives before.
    pub(crate) fn silent_at(self) -> Option<Time> {
        match self {
            LinkAnswers::Asked { until, .. } => Some(until),
            _ => None,
        }
    }
}

/// An unanswered probe of a link's first hop.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HopQuestion {
    pub(crate) ticket: u64,
    pub(crate) since: Time,
    /// Whether the link's quiet path caused the probe, so that the session needs the result.
    pub(crate) quiet: bool,
    /// Whether the first hop had answered before.
    answered_before: bool,
}

/// The state of a link's current attachment, apart from what the platform reports.
#[derive(Debug, Default)]
pub(crate) struct LinkHealth {
    /// Whether the first hop answered on this attachment.
    hop_answered: bool,
    question: Option<HopQuestion>,
    /// Whether the radio's counters were read on this attachment.
    pub(crate) radio_read: bool,
    /// Whether a reading of the radio's counters is under way.
    pub(crate) reading_radio: bool,
    pub(crate) radio_unsupported: bool,
    /// Since when the link has no carrier.
    pub(crate) carrier_lost_at: Option<Time>,
    /// Whether the program froze the link.
    pub(crate) frozen_by_program: bool,
    /// Whether the session knows that the link is frozen.
    pub(crate) frozen: bool,
}

impl LinkHealth {
    /// Whether the link's sockets are kept although it carries nothing.
    pub(crate) fn keeps_sockets(&self) -> bool {
        self.carrier_lost_at.is_some() || self.frozen_by_program
    }

    /// When the link counts as lost.
    pub(crate) fn given_up_at(&self) -> Option<Time> {
        self.carrier_lost_at.map(|at| at + CARRIER_LOST_MAX)
    }

    /// Forgets the state of this attachment, because the next one is a new one.
    pub(crate) fn forget(&mut self) {
        *self = LinkHealth {
            frozen_by_program: self.frozen_by_program,
            ..LinkHealth::default()
        };
    }

    /// Begins to probe the first hop. Returns false if a probe is already under way.
    pub(crate) fn begin_question(&mut self, now: Time, ticket: u64, quiet: bool) -> bool {
        if self.question.is_some() || self.keeps_sockets() {
            return false;
        }
        self.question = Some(HopQuestion {
            ticket,
            since: now,
            quiet,
            answered_before: self.hop_answered,
        });
        true
    }

    /// Evaluates a first hop's answer, if it belongs to the current probe.
    pub(crate) fn end_question(
        &mut self,
        ticket: u64,
        answer: Option<bool>,
    ) -> Option<(HopQuestion, FirstHopStatus)> {
        let question = self.question.take_if(|q| q.ticket == ticket)?;
        self.hop_answered |= answer == Some(true);
        let hop = match answer {
            Some(true) => FirstHopStatus::Answers,
            Some(false) if question.answered_before => FirstHopStatus::Silent,
            Some(false) | None => FirstHopStatus::Unknown,
        };
        Some((question, hop))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Time {
        Time::ZERO + Span::from_millis(n)
    }

    #[test]
    fn the_silence_of_a_first_hop_that_never_answered_says_nothing() {
        let mut health = LinkHealth::default();
        assert!(health.begin_question(ms(0), 1, true));
        assert!(!health.begin_question(ms(1), 2, true), "it is being asked");
        let (_, hop) = health.end_question(1, Some(false)).unwrap();
        assert_eq!(hop, FirstHopStatus::Unknown);
        assert!(health.begin_question(ms(2), 3, false));
        assert_eq!(
            health.end_question(3, Some(true)).unwrap().1,
            FirstHopStatus::Answers
        );
        assert!(health.begin_question(ms(3), 4, true));
        assert_eq!(
            health.end_question(4, Some(false)).unwrap().1,
            FirstHopStatus::Silent
        );
    }

    #[test]
    fn an_answer_about_another_attachment_is_ignored() {
        let mut health = LinkHealth::default();
        assert!(health.begin_question(ms(0), 1, true));
        health.forget();
        assert!(health.begin_question(ms(5), 2, true));
        assert!(health.end_question(1, Some(true)).is_none());
        assert_eq!(
            health.end_question(2, Some(false)).unwrap().1,
            FirstHopStatus::Unknown
        );
    }

    #[test]
    fn a_link_that_gives_no_answer_is_silent_after_a_second_and_stays_so_over_new_sockets() {
        let asked = LinkAnswers::Unasked.next(ms(0), ms(0), Span::ZERO, &[LinkId(1)], &[]);
        let until = ms(1_000);
        assert_eq!(
            asked,
            LinkAnswers::Asked {
                since: ms(0),
                until
            }
        );
        assert_eq!(asked.silent_at(), Some(ms(1_000)));
        assert_eq!(
            asked.next(ms(999), ms(0), Span::ZERO, &[LinkId(1)], &[]),
            asked
        );
        let silent = asked.next(ms(1_000), ms(0), Span::ZERO, &[LinkId(1)], &[]);
        assert_eq!(silent, LinkAnswers::Silent { since: ms(0) });
        assert_eq!(silent.next(ms(1_001), ms(0), Span::ZERO, &[], &[]), silent);
        assert_eq!(
            silent.next(ms(1_002), ms(1_002), Span::ZERO, &[LinkId(2)], &[]),
            silent
        );
    }
}
