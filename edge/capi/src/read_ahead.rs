//! Data that a socket buffers ahead of its program, and the demand that D2BufMgr computes from it
//! (`D2TP_SO_RCVBUFTH`).
//!
//! ```text
//!  flow: arrived ─▶ buffered here, AHEAD_BYTES_MAX at most ─▶ the pair: sent, not sent yet ─▶ program
//!        └───────────────────────── ahead of the program ───────────────────────────┘
//!   ahead ─▶ d2tp_sched::StreamBuffer ─▶ low reached: this many bytes may be paid for, up to high
//! ```
//!
//! A socket without thresholds buffers nothing here: flow control stops the peer when its program
//! does not read.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use d2tp_driver::{ArrivedBytes, LinkStatus, LinkUse, PathState};
use d2tp_sched::{
    BufferedStream, CostPolicy, DeadlineFallback, FlowDemand, PlaybackMeter, StreamBuffer,
    SwitchDelay,
};
use d2tp_time::Time;

use crate::options::SocketOptions;
use crate::pair;
use crate::rcvbuf_thresholds::{AHEAD_BYTES_MAX, RcvbufThresholds};

/// The most bytes that all sockets of an engine buffer together. Sockets that find no room buffer
/// one piece each.
const AHEAD_ALL_BYTES_MAX: u64 = 4 * AHEAD_BYTES_MAX; // a guess
/// The interval between decisions while the data ahead of a program matters.
pub(crate) const LOOK: Duration = Duration::from_millis(200); // the same as for other streams
/// The longest time that a reading rate covers, in seconds.
const PACED_S: u64 = 60;
/// The assumed rate of a link that was never measured: it gets a chance, because the buffer bridges
/// an error.
const UNMEASURED_BYTES_PER_S: f64 = 1e12;

/// The data buffered ahead of one program.
#[derive(Default)]
pub(crate) struct ReadAhead {
    /// The number of bytes buffered here.
    kept: Cell<u64>,
    /// The engine's end of the pair, while it is open.
    pair: Cell<Option<RawFd>>,
    /// Whether the peer has ended its direction.
    ended: Cell<bool>,
    reader: RefCell<Option<ProgramReader>>,
}

/// The reading rate of one program.
struct ProgramReader {
    levels: RcvbufThresholds,
    buffer: StreamBuffer,
    pace: PlaybackMeter,
    begun: Time,
    /// The number of bytes read at the last update.
    taken: u64,
    /// The time of the last update, since `begun`.
    updated_at: Duration,
}

/// The demand of a socket with thresholds.
#[derive(Debug, PartialEq)]
pub(crate) struct ReadAheadDemand {
    /// The demand for the scheduler.
    pub(crate) need: FlowDemand,
    /// Bytes of the object that the demand counts as, among other clients of the scheduler.
    pub(crate) size: u64,
    /// Bytes that may be paid for now.
    pub(crate) buy_bytes: Option<u64>,
    /// Whether everything has been received.
    pub(crate) has_all: bool,
    /// Whether the socket would pay, has no budget left, and holds nothing for its program to read.
    pub(crate) is_broke: bool,
}

/// What a socket's flow brought.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ReadAheadBytes {
    /// Bytes that arrived and are not read from the flow yet. There are many while losses are repaired.
    pub(crate) arrived: ArrivedBytes,
    /// Bytes written to the pair.
    pub(crate) to_program: u64,
}

impl ReadAhead {
    pub(crate) fn open(&self, pair: RawFd) {
        self.pair.set(Some(pair));
    }

    pub(crate) fn close(&self) {
        self.pair.set(None);
    }

    pub(crate) fn ended(&self) {
        self.ended.set(true);
    }

    /// Whether the peer's direction has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.get()
    }

    /// Bytes in this buffer.
    pub(crate) fn kept(&self) -> u64 {
        self.kept.get()
    }

    /// Bytes in the socket pair.
    fn unread(&self) -> u64 {
        self.pair.get().map_or(0, pair::unread)
    }

    /// Received bytes that the program has not read.
    pub(crate) fn bytes(&self) -> u64 {
        self.kept.get() + self.unread()
    }

    /// The current demand, given what is left of the budget; `None` without thresholds.
    pub(crate) fn update(
        &self,
        now: Time,
        options: &SocketOptions,
        statuses: &[LinkStatus],
        left: Option<u64>,
        ReadAheadBytes {
            arrived,
            to_program,
        }: ReadAheadBytes,
    ) -> Option<ReadAheadDemand> {
        let Some(levels) = options.thresholds else {
            self.reader.take();
            return None;
        };
        let unread = self.unread();
        let mut reader = self.reader.borrow_mut();
        if reader.as_ref().is_none_or(|reader| reader.levels != levels) {
            // Bytes read before the thresholds were set say nothing about the current rate.
            let taken = to_program.saturating_sub(unread);
            *reader = Some(ProgramReader::new(levels, statuses, now, taken));
        }
        let here = self.kept.get() + arrived.readable;
        let moved = to_program + here;
        let to_come = match options.size {
            _ if self.ended.get() => Some(0),
            size => size.map(|size| size.saturating_sub(moved)),
        };
        let is_broke = left == Some(0);
        let mut wants = reader.as_mut()?.demand(&ReadAheadInput {
            now,
            options,
            statuses,
            ahead: here + unread,
            taken: to_program.saturating_sub(unread),
            to_come,
        });
        // What has arrived is paid for, and is not to be bought again, but all that is missing before it is.
        let buy = |bytes: u64| bytes.saturating_sub(arrived.after_gap).max(arrived.missing);
        wants.buy_bytes = wants.buy_bytes.map(buy);
        wants.need.metered_bytes_left = left;
        wants.has_all = self.ended.get();
        if is_broke {
            wants.is_broke = wants.buy_bytes.take().is_some() && here + unread == 0;
        }
        Some(wants)
    }
}

/// The inputs of one update.
struct ReadAheadInput<'a> {
    now: Time,
    options: &'a SocketOptions,
    statuses: &'a [LinkStatus],
    ahead: u64,
    taken: u64,
    to_come: Option<u64>,
}

impl ProgramReader {
    fn new(
        levels: RcvbufThresholds,
        statuses: &[LinkStatus],
        now: Time,
        taken: u64,
    ) -> ProgramReader {
        let pace = PlaybackMeter::new(Some(f64::from(levels.rate)));
        let rate = pace.rate(Duration::ZERO);
        ProgramReader {
            buffer: StreamBuffer::new(levels.thresholds(rate), switch_delay(statuses)),
            levels,
            pace,
            begun: now,
            taken,
            updated_at: Duration::ZERO,
        }
    }

    /// Bytes that the program read since the last update, scaled to one second if that was longer ago:
    /// there are no updates while no metered link is up.
    fn bytes_read_since(&mut self, since: Duration, taken: u64) -> u64 {
        let seconds = since.saturating_sub(self.updated_at).as_secs().max(1);
        self.updated_at = since;
        let more = taken.saturating_sub(self.taken) / seconds;
        if more == 0 {
            return 0;
        }
        self.taken = taken;
        for ago in (0..seconds.min(PACED_S)).rev() {
            self.pace
                .on_read(since.saturating_sub(Duration::from_secs(ago)), more);
        }
        more
    }

    fn demand(&mut self, input: &ReadAheadInput<'_>) -> ReadAheadDemand {
        let since: Duration = input.now.since(self.begun).into();
        let read = self.bytes_read_since(since, input.taken);
        let rate = self.pace.rate(since);
        let thresholds = self.levels.thresholds(rate);
        self.buffer
            .set_thresholds(thresholds, switch_delay(input.statuses));
        let mut free = input
            .statuses
            .iter()
            .filter(|status| is_free(status))
            .peekable();
        let free_bytes_per_s = free.peek().is_some().then(|| {
            let rate = |status: &LinkStatus| {
                status
                    .rate
                    .map_or(UNMEASURED_BYTES_PER_S, |rate| rate as f64)
            };
            free.map(rate).sum()
        });
        let wanted = self.buffer.need(&BufferedStream {
            bytes_per_s: rate as u64,
            ahead_bytes: input.ahead,
            to_come_bytes: input.to_come,
            quota_bytes: AHEAD_BYTES_MAX,
            free_bytes_per_s,
        });
        let bytes = wanted.as_ref().and_then(|need| need.remaining_bytes);
        let bytes = bytes.unwrap_or(0);
        // Bytes that are read until the next update are no permanent reason to pay.
        let read = read.max((LOOK.as_secs_f64() * rate) as u64);
        let read = read.min(input.to_come.unwrap_or(u64::MAX).saturating_sub(bytes));
        let pays = self.buffer.is_filling() && pays(input.options, free_bytes_per_s.is_some());
        ReadAheadDemand {
            buy_bytes: (pays && bytes > 0).then_some(bytes + read),
            // Not all that a free link could carry, because everything else would be small beside
            // it.
            size: bytes.min(thresholds.high_bytes),
            need: FlowDemand {
                remaining_bytes: Some(bytes),
                left: wanted.and_then(|need| need.left),
                policy: input.options.policy,
                if_late: input.options.if_late,
                metered_bytes_left: None,
            },
            has_all: false,
            is_broke: false,
        }
    }
}

/// Whether the policy allows paying for a buffer that runs empty.
fn pays(options: &SocketOptions, free_works: bool) -> bool {
    match options.policy {
        CostPolicy::FreeOnly => false,
        CostPolicy::FreeFirst | CostPolicy::Balanced => options.if_late == DeadlineFallback::Cell,
        CostPolicy::Any => !free_works,
        CostPolicy::Fast => true,
    }
}

fn is_free(status: &LinkStatus) -> bool {
    let path = status.path.as_ref().map(|path| path.state);
    status.usage == LinkUse::Free && path == Some(PathState::Active)
}

/// The delay of a switch to another link: a path challenge takes one round trip, at most the longest of
/// all links.
fn switch_delay(statuses: &[LinkStatus]) -> SwitchDelay {
    let paths = statuses.iter().filter_map(|status| status.path.as_ref());
    let works = paths.filter(|path| path.state == PathState::Active);
    SwitchDelay::measured(works.map(|path| path.rtt.into()).max())
}

/// Bytes that all sockets of an engine buffer.
#[derive(Clone, Default)]
pub(crate) struct ReadAheadMemory(Rc<Cell<u64>>);

/// The buffered bytes of one program.
pub(crate) struct ReadAheadQueue<'a> {
    ahead: &'a ReadAhead,
    all: &'a Cell<u64>,
    pub(crate) pieces: VecDeque<Bytes>,
}

impl<'a> ReadAheadQueue<'a> {
    pub(crate) fn new(ahead: &'a ReadAhead, memory: &'a ReadAheadMemory) -> ReadAheadQueue<'a> {
        ReadAheadQueue {
            ahead,
            all: &memory.0,
            pieces: VecDeque::new(),
        }
    }

    /// Whether another piece may be read, if the socket may buffer `wanted` bytes.
    pub(crate) fn has_room(&self, wanted: u64) -> bool {
        let mine = self.ahead.kept.get();
        mine == 0 || mine < wanted && self.all.get() < AHEAD_ALL_BYTES_MAX
    }

    fn count(&self, kept: u64) {
        let before = self.ahead.kept.replace(kept);
        self.all.set(self.all.get() - before + kept);
    }

    /// Removes the first `bytes`, which were written to the program.
    pub(crate) fn on_written(&self, bytes: u64) {
        self.count(self.ahead.kept.get() - bytes);
    }

    pub(crate) fn push(&mut self, piece: Bytes) {
        self.count(self.ahead.kept.get() + piece.len() as u64);
        self.pieces.push_back(piece);
    }
}

impl Drop for ReadAheadQueue<'_> {
    fn drop(&mut self) {
        self.count(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rcvbuf_thresholds::RcvbufUnit;
    use d2tp_links::CostClass;
    use d2tp_time::Span;

    fn status(usage: LinkUse) -> LinkStatus {
        LinkStatus {
            name: "wwan0".into(),
            class: CostClass::Metered,
            usage,
            payload: (0, 0),
            busy: Default::default(),
            rate: Some(1_000_000),
            answers: d2tp_driver::LinkAnswers::Answering,
            stream: d2tp_driver::StreamStatus::Unused,
            path: None,
        }
    }

    fn at(ms: u64) -> Time {
        Time::ZERO + Span::from_millis(ms)
    }

    fn levels(low: u64, high: u64, unit: RcvbufUnit, rate: u32) -> RcvbufThresholds {
        RcvbufThresholds {
            low,
            high,
            unit,
            rate,
        }
    }

    fn reading(levels: RcvbufThresholds, policy: CostPolicy) -> SocketOptions {
        SocketOptions {
            thresholds: Some(levels),
            policy,
            ..SocketOptions::default()
        }
    }

    fn to_program(bytes: u64) -> ReadAheadBytes {
        ReadAheadBytes {
            to_program: bytes,
            ..ReadAheadBytes::default()
        }
    }

    /// Simulates a program that reads 100 kB per second over a metered link of ten times that rate,
    /// for `seconds`. Returns the smallest and largest amount buffered, and how often it began to
    /// pay.
    fn run(options: &SocketOptions, seconds: u64) -> (u64, u64, u32) {
        let ahead = ReadAhead::default();
        let statuses = [status(LinkUse::Paid)];
        let (mut came, mut taken) = (0_u64, 0_u64);
        let (mut least, mut most, mut begun) = (u64::MAX, 0, 0);
        let mut paid = false;
        for look in 1..seconds * 5 {
            ahead.kept.set(came - taken);
            let bytes = to_program(taken);
            let wants = ahead.update(at(look * 200), options, &statuses, None, bytes);
            let fills = wants.expect("it has thresholds").buy_bytes;
            begun += u32::from(fills.is_some() && !paid);
            paid = fills.is_some();
            came += fills.unwrap_or(0).min(200_000);
            if begun > 0 && came > 0 {
                taken += 20_000.min(came - taken);
            }
            if look > 10 {
                (least, most) = (least.min(came - taken), most.max(came - taken));
            }
        }
        (least, most, begun)
    }

    #[test]
    fn a_metered_link_is_paid_for_up_to_high_and_again_from_low() {
        let bytes = levels(300_000, 900_000, RcvbufUnit::Bytes, 0);
        for policy in [
            CostPolicy::FreeFirst,
            CostPolicy::Balanced,
            CostPolicy::Fast,
            CostPolicy::Any,
        ] {
            let (least, most, begun) = run(&reading(bytes, policy), 60);
            assert!((260_000..=300_000).contains(&least), "{policy:?}: {least}");
            assert!((860_000..=950_000).contains(&most), "{policy:?}: {most}");
            assert!((8..=11).contains(&begun), "{policy:?}: {begun}");
        }
        // The same levels as times, at the stated rate.
        let times = levels(3_000, 9_000, RcvbufUnit::Ms, 100_000);
        let bytes = levels(300_000, 900_000, RcvbufUnit::Bytes, 100_000);
        assert_eq!(
            run(&reading(times, CostPolicy::FreeFirst), 60),
            run(&reading(bytes, CostPolicy::FreeFirst), 60)
        );
    }

    #[test]
    fn who_must_not_pay_does_not_however_dry_it_is() {
        let bytes = levels(300_000, 900_000, RcvbufUnit::Bytes, 0);
        assert_eq!(run(&reading(bytes, CostPolicy::FreeOnly), 20).2, 0);
        let patient = SocketOptions {
            if_late: DeadlineFallback::Wait,
            ..reading(bytes, CostPolicy::FreeFirst)
        };
        assert_eq!(run(&patient, 20).2, 0);
    }

    #[test]
    fn without_a_rate_that_was_said_a_time_is_what_the_program_reads_in_it() {
        let times = levels(3_000, 9_000, RcvbufUnit::Ms, 0);
        let mut reader = ProgramReader::new(times, &[], at(0), 0);
        let options = reading(times, CostPolicy::FreeFirst);
        // 40 kB per second; for ten minutes without metered links there are no updates.
        let mut size = 0;
        for second in (1..=30).chain([630]) {
            let input = ReadAheadInput {
                now: at(second * 1_000),
                options: &options,
                statuses: &[],
                ahead: 0,
                taken: second * 40_000,
                to_come: None,
            };
            size = reader.demand(&input).size;
        }
        assert!((350_000..=370_000).contains(&size), "{size}: 9 s of it");
    }

    #[test]
    fn nothing_is_paid_for_when_all_is_here_or_the_budget_is_used_up() {
        let bytes = levels(300_000, 900_000, RcvbufUnit::Bytes, 0);
        let options = SocketOptions {
            size: Some(1_000_000),
            ..reading(bytes, CostPolicy::FreeFirst)
        };
        let statuses = [status(LinkUse::Paid)];
        let ahead = ReadAhead::default();
        let look = |left, taken| {
            let wants = ahead.update(at(0), &options, &statuses, left, to_program(taken));
            let wants = wants.expect("it has thresholds");
            (wants.buy_bytes, wants.is_broke)
        };
        // And the bytes that may be read until the next update.
        assert_eq!(look(None, 0), (Some(950_000), false));
        // The last bytes of the object.
        assert_eq!(look(None, 999_000), (Some(1_000), false));
        assert_eq!(look(Some(0), 999_000), (None, true));
        ahead.kept.set(500);
        assert_eq!(
            look(Some(0), 999_000),
            (None, false),
            "there is more to read"
        );
        ahead.kept.set(0);
        ahead.ended();
        assert_eq!(look(None, 0), (None, false));
    }

    #[test]
    fn what_arrived_and_is_not_read_yet_is_not_paid_for_again() {
        let options = reading(
            levels(300_000, 900_000, RcvbufUnit::Bytes, 0),
            CostPolicy::FreeFirst,
        );
        let statuses = [status(LinkUse::Paid)];
        let ahead = ReadAhead::default();
        let look = |readable, after_gap, missing| {
            let bytes = ReadAheadBytes {
                arrived: ArrivedBytes {
                    readable,
                    after_gap,
                    missing,
                },
                to_program: 0,
            };
            let wants = ahead.update(at(0), &options, &statuses, None, bytes);
            wants.expect("it has thresholds").buy_bytes
        };
        // And the bytes that may be read until the next update.
        assert_eq!(look(0, 0, 0), Some(950_000));
        assert_eq!(look(250_000, 0, 0), Some(700_000));
        ahead.kept.set(500_000);
        assert_eq!(look(250_000, 0, 0), Some(200_000));
        assert_eq!(look(250_000, 120_000, 2_000), Some(80_000));
        // A gap is always filled.
        assert_eq!(look(250_000, 400_000, 2_000), Some(2_000));
        assert_eq!(look(400_000, 0, 0), None);
    }

    #[test]
    fn what_lies_in_the_pair_is_ahead_too() {
        use std::io::{Read as _, Write as _};
        use std::os::fd::AsRawFd as _;
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut ours = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut program, _) = listener.accept().unwrap();
        let ahead = ReadAhead::default();
        ahead.open(ours.as_raw_fd());
        assert_eq!(ahead.bytes(), 0);
        ours.write_all(&[7; 10_000]).unwrap();
        program.read_exact(&mut [0; 4_000]).unwrap();
        assert_eq!(ahead.bytes(), 6_000);
        // More than it accepts: bytes in transit count as well.
        ours.set_nonblocking(true).unwrap();
        let mut more = 0;
        while let Ok(written) = ours.write(&[7; 65_536]) {
            more += written as u64;
        }
        assert_eq!(ahead.bytes(), 6_000 + more);
        ahead.close();
        assert_eq!(ahead.bytes(), 0);
    }
}
