//! NewReno, as specified in RFC 9002 §7.

use d2tp_time::{Span, Time};

use super::{
    AckEvent, Controller, SiblingPaths, WINDOW_INITIAL_DATAGRAMS, WINDOW_MIN_DATAGRAMS, resumed,
};

#[derive(Debug)]
pub(super) struct NewReno {
    datagram: u64,
    window: u64,
    threshold: u64,
    acked: u64,
    /// The number of paths that together grow as one connection does.
    sharers: u32,
    recovery_start: Option<Time>,
    before: Option<(u64, u64)>,
}

impl NewReno {
    pub(super) fn new(datagram: u64) -> Self {
        NewReno {
            datagram,
            window: WINDOW_INITIAL_DATAGRAMS * datagram,
            threshold: u64::MAX,
            acked: 0,
            sharers: 1,
            recovery_start: None,
            before: None,
        }
    }
}

impl Controller for NewReno {
    fn on_ack(&mut self, a: AckEvent, _: SiblingPaths<'_>) {
        if a.app_limited || self.recovery_start.is_some_and(|t| a.sent_at <= t) {
            return;
        }
        if self.window < self.threshold {
            self.window += a.bytes;
        } else {
            self.acked += a.bytes;
            let need = self.window * u64::from(self.sharers);
            if self.acked >= need {
                self.acked -= need;
                self.window += self.datagram;
            }
        }
    }
    fn on_loss(&mut self, now: Time, sent_at: Time) {
        if self.recovery_start.is_some_and(|t| sent_at <= t) {
            return;
        }
        self.before = Some((self.window, self.threshold));
        self.recovery_start = Some(now);
        self.window = (self.window / 2).max(WINDOW_MIN_DATAGRAMS * self.datagram);
        self.threshold = self.window;
        self.acked = 0;
    }
    fn on_persistent_congestion(&mut self) {
        self.window = WINDOW_MIN_DATAGRAMS * self.datagram;
        self.recovery_start = None;
        self.before = None;
    }
    fn on_blackout(&mut self, _: Span, careful: bool) {
        self.before = None;
        if careful {
            (self.window, self.threshold) = resumed(self.window, self.threshold, self.datagram);
        }
    }
    fn resume(&mut self, window: u64, threshold: u64) {
        let window = window.max(WINDOW_INITIAL_DATAGRAMS * self.datagram);
        (self.window, self.threshold) = (window, threshold);
    }
    fn retreat(&mut self, window: u64) {
        self.before = None;
        self.window = window.max(WINDOW_MIN_DATAGRAMS * self.datagram);
        self.threshold = self.window;
    }
    fn on_spurious(&mut self) {
        if let Some((window, threshold)) = self.before.take() {
            self.window = self.window.max(window);
            self.threshold = threshold;
            self.recovery_start = None;
        }
    }
    fn raise_reduced_window(&mut self, window: u64) {
        self.window = self.window.max(window);
        self.threshold = self.window;
    }
    fn on_random_loss_only(&mut self) {
        self.threshold = u64::MAX;
        self.before = None;
    }
    fn set_share(&mut self, paths: u32) {
        self.sharers = paths.max(1);
    }
    fn on_shared_loss(&mut self, now: Time, sent_at: Time) {
        let before = self.before.take();
        self.on_loss(now, sent_at);
        self.before = before.filter(|_| self.before.is_none());
    }
    fn set_datagram(&mut self, bytes: u64) {
        self.datagram = bytes;
        self.window = self.window.max(WINDOW_MIN_DATAGRAMS * bytes);
    }
    fn window(&self) -> u64 {
        self.window
    }
    fn resumed_window(&self) -> u64 {
        if self.in_slow_start() {
            self.threshold
        } else {
            u64::MAX
        }
    }
    fn in_slow_start(&self) -> bool {
        self.window < self.threshold
    }
}
