//! The transmission time of frames on 802.11, computed as in the standard.
//!
//! ```text
//!  DIFS │ backoff, 0..CW slots │ preamble │ MAC + LLC + IP packet + FCS │ SIFS │ preamble │ ACK │
//!       │◀── contention ──────▶│◀──────── frame ───────────────────────▶│◀──── answer ─────────▶│
//! ```
//!
//! A 40-byte packet takes nearly all of that time as well, which is why acknowledgements are
//! expensive here. Numbers are from IEEE Std 802.11-2016: clause 16 (HR/DSSS, "b"), clauses 17 and
//! 18 (OFDM, ERP, "g").

use d2tp_time::Span;
use serde::Deserialize;

/// Bytes around an IP packet: MAC header and FCS (9.3.2), LLC and SNAP (RFC 1042).
const AROUND_IP_BYTES: u64 = 24 + 4 + 8;
/// Bytes of a link-layer acknowledgement with its FCS (9.3.1.4).
const ACK_BYTES: u64 = 14;

/// A half-duplex medium that a station and its access point contend for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum Medium {
    /// 11 Mb/s, long preamble, link-layer acknowledgements at 2 Mb/s, the highest basic rate of
    /// the first 802.11.
    #[serde(rename = "802.11b")]
    Dot11b,
    /// 54 Mb/s, short slots, acknowledgements at 24 Mb/s, the highest mandatory rate; no stations
    /// near that support only 802.11b.
    #[serde(rename = "802.11g")]
    Dot11g,
}

impl Medium {
    /// The length of a contention slot. // Table 16-4; Table 18-5, short
    pub fn slot(self) -> Span {
        Span::from_micros(match self {
            Medium::Dot11b => 20,
            Medium::Dot11g => 9,
        })
    }

    /// The time between a frame and its answer. // Table 16-4; Table 18-5
    pub fn sifs(self) -> Span {
        Span::from_micros(10)
    }

    /// How long the medium is idle before slots count (10.3.2.3.5).
    pub fn difs(self) -> Span {
        self.sifs() + self.slot().times(2)
    }

    /// The first contention window and the largest, in slots. // Table 16-4; Table 17-21
    pub fn windows(self) -> (u32, u32) {
        match self {
            Medium::Dot11b => (31, 1023),
            Medium::Dot11g => (15, 1023),
        }
    }

    /// The transmission time of the frame that carries an IP packet of `bytes`, without its answer.
    pub fn frame(self, bytes: u32) -> Span {
        self.airtime(AROUND_IP_BYTES + u64::from(bytes), false)
    }

    /// The time after a frame that arrived: the gap and the acknowledgement.
    pub fn answer(self) -> Span {
        self.sifs() + self.airtime(ACK_BYTES, true)
    }

    fn airtime(self, bytes: u64, basic: bool) -> Span {
        let bits = 8 * bytes;
        match self {
            // Long preamble 144 µs and PLCP header 48 µs (16.2.2.2), then bits at the rate (16.2.3.6).
            Medium::Dot11b => {
                let mbps = if basic { 2 } else { 11 };
                Span::from_micros(192 + bits.div_ceil(mbps))
            }
            // Preamble 16 µs, SIGNAL 4 µs, symbols of 4 µs with 16 service and 6 tail bits (17.4.3),
            // signal extension 6 µs (18.3.2.4).
            Medium::Dot11g => {
                let bits_per_symbol = if basic { 96 } else { 216 };
                let symbols = (16 + bits + 6).div_ceil(bits_per_symbol);
                Span::from_micros(16 + 4 + 4 * symbols + 6)
            }
        }
    }

    /// The mean time from one frame of a single busy sender to the next: a packet of `bytes`, its
    /// answer, and half a contention window.
    pub fn cycle(self, bytes: u32) -> Span {
        self.exchange(bytes) + self.backoff_mean()
    }

    /// The mean time from one frame of a busy sender to the next, if the receiver sends a packet of
    /// `back` bytes for every `every` packets that it gets, and had time to send the previous one.
    ///
    /// The busy sender counts down its slots whether or not the other station does too, so an
    /// answer adds only its exchange, and sometimes a collision: with probability 2/(CW+1) (Bianchi
    /// 2000, eq. 8) both begin in the same slot, the longer frame is lost time, and the sender
    /// draws from twice the window.
    pub fn cycle_answered(self, bytes: u32, back: u32, every: u32) -> Span {
        let (first, _) = self.windows();
        let collision = self.exchange(bytes.max(back)) + self.backoff_mean().times(2);
        let answer = self.exchange(back) + collision.scaled(2, u64::from(first) + 1);
        self.cycle(bytes) + answer.divided(u64::from(every))
    }

    /// The time for a packet of `bytes` and everything around it except the backoff.
    fn exchange(self, bytes: u32) -> Span {
        self.difs() + self.frame(bytes) + self.answer()
    }

    fn backoff_mean(self) -> Span {
        let (first, _) = self.windows();
        self.slot().times(u64::from(first)).divided(2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn us(span: Span) -> u64 {
        span.as_micros()
    }

    #[test]
    fn a_full_frame_takes_what_the_standard_says() {
        // 192 + 1536 × 8 / 11; 26 + 57 symbols of 4.
        assert_eq!(us(Medium::Dot11b.frame(1500)), 192 + 1118);
        assert_eq!(us(Medium::Dot11g.frame(1500)), 26 + 228);
        // 10 + 192 + 14 × 8 / 2; 10 + 26 + 2 symbols.
        assert_eq!(us(Medium::Dot11b.answer()), 10 + 192 + 56);
        assert_eq!(us(Medium::Dot11g.answer()), 10 + 26 + 8);
        assert_eq!(
            [Medium::Dot11b, Medium::Dot11g].map(|m| us(m.difs())),
            [50, 28]
        );
    }

    #[test]
    fn a_lone_sender_gets_six_and_thirty_mbps() {
        assert_eq!(us(Medium::Dot11b.cycle(1500)), 50 + 310 + 1310 + 258);
        assert_eq!(us(Medium::Dot11g.cycle(1500)), 28 + 67 + 254 + 44);
    }

    #[test]
    fn an_acknowledgement_costs_a_third_of_a_full_frame() {
        for (medium, least, most) in [(Medium::Dot11b, 0.25, 0.5), (Medium::Dot11g, 0.25, 0.5)] {
            let alone = medium.cycle(1500).as_millis_f64();
            let answered = medium.cycle_answered(1500, 52, 1).as_millis_f64();
            let more = answered / alone - 1.0;
            assert!(more > least && more < most, "{medium:?}: {more}");
        }
    }
}
