//! What the session's credit leaves to each flow (R-FLOW-12).
//!
//! ```text
//!  session credit  ├── unread bytes of flow 1 ──┤├── of flow 2 ──┤├─── left ───┤
//!                  a flow has at most twice as many unread bytes as are left
//! ```
//!
//! The peer's program may leave a flow unread, for example a download that it paused. Without a limit beside the flow's own
//! credit, two such flows use up the session's, and no other flow moves. With it, N of them leave a (2 N + 1)th part. One flow
//! alone may use two thirds, which is more than its own credit. (Choudhury and Hahne: dynamic queue length thresholds.)

/// How many times what is left a flow's unread bytes may be.
const UNREAD_SHARE: u64 = 2; // a guess: 1 would let a flow use half of the credit, which is its own by default

/// New bytes that the session's credit allows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SessionRoom {
    /// Bytes that may be sent in all flows together.
    pub(crate) left: u64,
    /// The bytes beyond those it has read that the peer lets a flow send; zero if unknown.
    pub(crate) flow_window: u64,
}

impl SessionRoom {
    /// As much as a flow's own credit allows.
    pub(crate) const UNLIMITED: SessionRoom = SessionRoom {
        left: u64::MAX,
        flow_window: 0,
    };

    /// No new bytes.
    pub(crate) const NONE: SessionRoom = SessionRoom {
        left: 0,
        flow_window: 0,
    };

    /// R-FLOW-12: how many new bytes a flow may send that sent `next` bytes and has this credit.
    #[inline]
    pub(crate) fn of_flow(self, next: u64, credit: u64) -> u64 {
        if self.flow_window == 0 {
            return self.left;
        }
        let unread_max = (next + self.flow_window).saturating_sub(credit);
        // Some of them may have been read, which the peer need not announce yet.
        let unread = unread_max.saturating_sub(unannounced_max(self.flow_window, self.left));
        let allowed = self.left.saturating_mul(UNREAD_SHARE);
        // Each byte sent adds one to the flow's and takes one from what is left.
        let more = allowed.saturating_sub(unread).div_ceil(UNREAD_SHARE + 1);
        more.min(self.left)
    }
}

#[cfg(test)]
impl From<u64> for SessionRoom {
    fn from(left: u64) -> SessionRoom {
        SessionRoom {
            left,
            flow_window: 0,
        }
    }
}

/// How many bytes of a flow may be read at most until that is announced: a quarter of its window, and no more than is left
/// of the session's credit.
#[inline]
pub(crate) fn unannounced_max(flow_window: u64, left: u64) -> u64 {
    (flow_window / 4).min(left)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: u64 = 8 << 20;
    const SESSION: u64 = 16 << 20;

    /// Sends as much of each flow as is allowed, in turn, when nothing is read. Returns what is left.
    fn left_by(flows: usize) -> u64 {
        let mut sent = vec![0; flows];
        loop {
            let before: u64 = sent.iter().sum();
            let mut left = SESSION - before;
            for next in &mut sent {
                let room = SessionRoom {
                    left,
                    flow_window: WINDOW,
                };
                let more = room.of_flow(*next, WINDOW);
                let more = more.min(WINDOW - *next).min(1_400);
                *next += more;
                left -= more;
            }
            if sent.iter().sum::<u64>() == before {
                return left;
            }
        }
    }

    #[test]
    fn flows_that_nobody_reads_leave_credit_to_others_however_many_they_are() {
        assert_eq!(
            left_by(1),
            SESSION - WINDOW,
            "one alone has all of its own credit"
        );
        for flows in [2, 8, 64, 1_000] {
            let left = left_by(flows);
            let share = SESSION / (3 * flows as u64 + 1);
            assert!(left > share / 2, "{flows} flows leave {left}");
        }
    }

    #[test]
    fn a_flow_whose_bytes_are_all_read_is_never_held_back() {
        for left in [1, 100, 64 << 10, 1 << 20, SESSION] {
            let room = SessionRoom {
                left,
                flow_window: WINDOW,
            };
            // What the peer has read without announcing it yet.
            let unannounced = unannounced_max(WINDOW, left);
            assert!(room.of_flow(unannounced, WINDOW) > 0, "{left}");
        }
        assert_eq!(SessionRoom::UNLIMITED.of_flow(5, 10), u64::MAX);
        assert_eq!(SessionRoom::NONE.of_flow(0, 10), 0);
    }
}
