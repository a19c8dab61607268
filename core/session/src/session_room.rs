//! What the session's credit leaves to each flow (R-FLOW-12).
//!
//! ```text
//!  session credit  ├── unread bytes of flow 1 ──┤├── of flow 2 ──┤├─── left ───┤
//!                  a flow has at most 2 · left² / session window unread bytes
//! ```
//!
//! The peer's program may leave a flow unread, for example a download that it paused. Without a limit beside the flow's own
//! credit, two such flows use up the session's, and no other flow moves. With this one, N of them leave about a (3 N)th
//! part, whether they came together or one after another: a limit in proportion to what is left, as Choudhury and Hahne's,
//! would leave a third each time. A flow has a packet or two in any case, so that after some hundred that come one after
//! another nothing is left. One flow alone may use half of the credit, which is its own by default.

/// New bytes that the session's credit allows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SessionRoom {
    /// Bytes that may be sent in all flows together.
    pub(crate) left: u64,
    /// The bytes beyond those it has read that the peer lets all flows send.
    pub(crate) session_window: u64,
    /// The bytes beyond those it has read that the peer lets a flow send; zero if unknown.
    pub(crate) flow_window: u64,
}

impl SessionRoom {
    /// The session's credit limits nothing; a flow's own credit does.
    pub(crate) const UNLIMITED: SessionRoom = SessionRoom {
        left: u64::MAX,
        session_window: 0,
        flow_window: 0,
    };

    /// No new bytes.
    pub(crate) const NONE: SessionRoom = SessionRoom {
        left: 0,
        ..SessionRoom::UNLIMITED
    };

    /// R-FLOW-12: how many new bytes a flow may send, in one packet, that sent `next` bytes and has this credit.
    #[inline]
    pub(crate) fn of_flow(self, next: u64, credit: u64) -> u64 {
        if self.flow_window == 0 {
            return self.left;
        }
        let unread_max = (next + self.flow_window).saturating_sub(credit);
        // Some of them may have been read, which the peer need not announce yet.
        let unannounced = unannounced_max(self.flow_window, self.session_window, self.left);
        let unread = unread_max.saturating_sub(unannounced);
        let allowed = 2 * shrinking_share(self.session_window, self.left);
        match unread == 0 || unread < allowed {
            true => self.left,
            false => 0,
        }
    }
}

#[cfg(test)]
impl From<u64> for SessionRoom {
    fn from(left: u64) -> SessionRoom {
        SessionRoom {
            left,
            ..SessionRoom::UNLIMITED
        }
    }
}

/// left² / session window.
#[inline]
fn shrinking_share(session_window: u64, left: u64) -> u64 {
    let share = u128::from(left) * u128::from(left) / u128::from(session_window.max(1));
    u64::try_from(share).map_or(u64::MAX / 2, |share| share.min(u64::MAX / 2))
}

/// The bytes of a flow that may be read without being announced whatever is left: one packet's.
const UNANNOUNCED_MIN: u64 = 1_200; // a guess: fewer would cost a frame for each packet

/// R-FLOW-13: how many bytes of a flow may be read at most until that is announced.
#[inline]
pub(crate) fn unannounced_max(flow_window: u64, session_window: u64, left: u64) -> u64 {
    let share = shrinking_share(session_window, left).max(UNANNOUNCED_MIN);
    share.min(flow_window / 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: u64 = 8 << 20;
    const SESSION: u64 = 16 << 20;
    const PACKET: u64 = 1_400;

    fn room(left: u64) -> SessionRoom {
        SessionRoom {
            left,
            session_window: SESSION,
            flow_window: WINDOW,
        }
    }

    /// Sends a packet of a flow of which nothing is read. Returns its bytes.
    fn send(next: &mut u64, left: u64) -> u64 {
        let more = room(left).of_flow(*next, WINDOW);
        let more = more.min(WINDOW - *next).min(PACKET);
        *next += more;
        more
    }

    #[test]
    fn flows_that_nobody_reads_leave_credit_to_others_however_many_they_are() {
        let (mut alone, mut left) = (0, SESSION);
        while left > 0 && send(&mut alone, left) > 0 {
            left = SESSION - alone;
        }
        assert_eq!(alone, WINDOW, "one alone has all of its own credit");
        for count in [2, 8, 64, 500] {
            let least = SESSION / (4 * count as u64);
            // All at once.
            let (mut flows, mut left) = (vec![0; count], SESSION);
            loop {
                let before = left;
                flows.iter_mut().for_each(|next| left -= send(next, left));
                if left == before {
                    break;
                }
            }
            assert!(left > least, "{count} flows at once leave {left}");
            // One after another; each takes two packets' bytes at least.
            if count > 64 {
                continue;
            }
            let mut left = SESSION;
            for _ in 0..count {
                let mut next = 0;
                loop {
                    match send(&mut next, left) {
                        0 => break,
                        sent => left -= sent,
                    }
                }
            }
            assert!(left > least / 2, "{count} flows in turn leave {left}");
        }
    }

    #[test]
    fn a_flow_whose_bytes_are_all_read_is_never_held_back() {
        for left in [1, 100, 64 << 10, 1 << 20, SESSION] {
            // What the peer has read without announcing it yet.
            let unannounced = unannounced_max(WINDOW, SESSION, left);
            assert_eq!(room(left).of_flow(unannounced, WINDOW), left);
        }
        assert_eq!(SessionRoom::UNLIMITED.of_flow(5, 10), u64::MAX);
        assert_eq!(SessionRoom::NONE.of_flow(0, 10), 0);
    }
}
