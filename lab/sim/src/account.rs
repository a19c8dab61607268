//! The exact byte counts of a transfer: by link, and of repeated bytes. A crash does not undo them.

use cedos_lab_link::{Span, Time};
use cedos_lab_scenario::Direction;
use d2tp_session::FlowArrival;

use crate::stream::REQUEST_BYTES;

/// The byte counts of one transfer.
#[derive(Clone, Debug)]
pub(crate) struct Account {
    pub(crate) by_link: Vec<u64>,
    pub duplicate: u64,
    /// Bytes of an upload's request that have not arrived and are not content.
    request_left: u64,
    /// When the first and the last new content arrived.
    pub(crate) came: Option<(Time, Time)>,
    /// The longest time between two arrivals of new content.
    pub(crate) silence_max: Span,
}

impl Account {
    pub(crate) fn new(links: usize) -> Account {
        Account {
            by_link: vec![0; links],
            duplicate: 0,
            request_left: 0,
            came: None,
            silence_max: Span::ZERO,
        }
    }

    /// Records that a flow was opened, which begins with a request.
    pub(crate) fn on_request(&mut self) {
        self.request_left = REQUEST_BYTES as u64;
    }

    /// Counts a piece that arrived over a link. Returns how much of it was content.
    pub(crate) fn on_arrived(
        &mut self,
        now: Time,
        link: usize,
        way: Direction,
        piece: &FlowArrival,
    ) -> u64 {
        let request = match way {
            Direction::Up => self.request_left.min(piece.new),
            Direction::Down => 0,
        };
        self.request_left -= request;
        if piece.new > request {
            let (first, last) = self.came.unwrap_or((now, now));
            self.silence_max = self.silence_max.max(now.since(last));
            self.came = Some((first, now));
        }
        let content = piece.bytes - request;
        self.by_link[link] += content;
        self.duplicate += piece.bytes - piece.new;
        content
    }

    /// Bytes carried by a link.
    pub(crate) fn of_link(&self, link: usize) -> u64 {
        self.by_link[link]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use d2tp_session::FlowId;

    #[test]
    fn a_request_is_not_content_and_what_came_twice_is_counted_and_not_waited_for() {
        let mut account = Account::new(2);
        account.on_request();
        let piece = |bytes, new| FlowArrival {
            flow: FlowId(0),
            bytes,
            new,
        };
        let mut arrive = |second, link, piece| {
            account.on_arrived(Time::from_secs_f64(second), link, Direction::Up, &piece)
        };
        assert_eq!(arrive(1.0, 1, piece(20, 20)), 0);
        assert_eq!(arrive(2.0, 1, piece(105, 105)), 100);
        assert_eq!(arrive(3.0, 0, piece(50, 20)), 50);
        assert_eq!(arrive(4.0, 0, piece(20, 0)), 20);
        assert_eq!((account.of_link(0), account.of_link(1)), (70, 100));
        assert_eq!(account.duplicate, 50);
        let came = account
            .came
            .map(|(a, b)| (a.as_secs_f64(), b.as_secs_f64()));
        assert_eq!(came, Some((2.0, 3.0)));
        assert_eq!(account.silence_max, Span::from_secs(1));
    }
}
