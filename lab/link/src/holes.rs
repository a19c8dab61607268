//! Outages of a link: stays, in which the link is available, and holes in turn.
//!
//! ```text
//!  0                                                       length
//!  ███████│  hole  │██████████████│ hole │████████│  hole  │███
//!   stay              stay                 stay
//! ```
//!
//! Lengths are drawn one after another, and the run begins at a random point of this sequence: in
//! the middle of a stay or of a hole.

use d2tp_time::{Span, Time};
use rand::Rng;
use rand_pcg::Pcg32;

use crate::link::seeded;

/// The random stream from which holes are drawn; the links of a run use lower ones.
const STREAM: u64 = 1 << 34;
/// The value that a normal distribution exceeds in one of ten cases, in standard deviations.
const TENTH: f64 = 1.2816;

/// The distribution of the lengths of stays or holes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DurationModel {
    /// A constant length.
    Always(Span),
    /// Evenly distributed from zero to this length.
    Evenly(Span),
    /// Log-normal: half are longer than the median, one of ten longer than `tenth`.
    LogNormal {
        /// The median length.
        median: Span,
        /// The length that one hole of ten exceeds.
        tenth: Span,
    },
}

impl DurationModel {
    /// Draws a length in whole milliseconds.
    fn draw(self, rng: &mut Pcg32) -> Span {
        let ms = match self {
            DurationModel::Always(span) => return span,
            DurationModel::Evenly(most) => most.as_millis_f64() * rng.random::<f64>(),
            DurationModel::LogNormal { median, tenth } => {
                let deviation = (tenth.as_secs_f64() / median.as_secs_f64()).ln() / TENTH;
                // The sum of twelve even draws is close enough to a normal one.
                let normal = (0..12).map(|_| rng.random::<f64>()).sum::<f64>() - 6.0;
                median.as_millis_f64() * (deviation * normal).exp()
            }
        };
        Span::from_millis(ms.round() as u64)
    }
}

/// The holes of a link, from zero to an end.
#[derive(Clone, Debug, PartialEq)]
pub struct Holes {
    length: Span,
    /// The start and end of each hole: ascending, disjoint, within the length.
    holes: Vec<(Time, Time)>,
}

impl Holes {
    /// A run without holes.
    pub fn none(length: Span) -> Holes {
        let holes = Vec::new();
        Holes { length, holes }
    }

    /// A run of this length with these holes.
    #[cfg(test)]
    pub(crate) fn of(length: Span, holes: Vec<(Time, Time)>) -> Holes {
        Holes { length, holes }
    }

    /// Draws a sequence, and a start in it. A stay of length zero becomes one of a millisecond.
    pub fn drawn(seed: u64, stays: DurationModel, gaps: DurationModel, length: Span) -> Holes {
        let mut rng = seeded(seed, STREAM);
        let begin = DurationModel::Evenly(length).draw(&mut rng);
        let end = Time::ZERO + begin + length;
        let (mut at, mut holes) = (Time::ZERO, Vec::new());
        while at < end {
            let from = at + stays.draw(&mut rng).max(Span::from_millis(1));
            at = from + gaps.draw(&mut rng);
            if at > from {
                holes.push((from, at));
            }
        }
        let course = Holes {
            length: begin + length,
            holes,
        };
        course.part(Time::ZERO + begin, length)
    }

    /// The part from `begin` on, of this length.
    pub fn part(&self, begin: Time, length: Span) -> Holes {
        let moved = |at: Time| (Time::ZERO + at.since(begin)).min(Time::ZERO + length);
        let holes = self
            .holes
            .iter()
            .map(|(from, to)| (moved(*from), moved(*to)));
        let holes = holes.filter(|(from, to)| from < to).collect();
        Holes { length, holes }
    }

    /// The holes delayed by `lead`, during which the link is available.
    pub fn after(&self, lead: Span) -> Holes {
        let later = self
            .holes
            .iter()
            .map(|(from, to)| (*from + lead, *to + lead));
        Holes {
            length: self.length + lead,
            holes: later.collect(),
        }
    }

    /// The start and end of every hole.
    pub fn iter(&self) -> impl Iterator<Item = (Time, Time)> + '_ {
        self.holes.iter().copied()
    }

    /// The length of the run.
    pub fn length(&self) -> Span {
        self.length
    }

    /// The total time for which the link is available.
    pub fn there(&self) -> Span {
        let gone = self.iter().map(|(from, to)| to.since(from));
        self.length
            .saturating_sub(gone.fold(Span::ZERO, |all, gone| all + gone))
    }

    /// The end of the stay that contains this time; `None` in a hole, or past the end.
    pub fn stay_until(&self, at: Time) -> Option<Time> {
        let end = Time::ZERO + self.length;
        if at >= end {
            return None;
        }
        match self.iter().find(|(_, to)| *to > at) {
            Some((from, _)) if from <= at => None,
            Some((from, _)) => Some(from),
            None => Some(end),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Span = Span::from_secs(1);

    fn at(s: u64) -> Time {
        Time::ZERO + S.times(s)
    }

    fn four_of_twelve() -> Holes {
        Holes::of(S.times(12), vec![(at(3), at(5)), (at(8), at(10))])
    }

    #[test]
    fn a_part_has_the_holes_that_reach_into_it() {
        let part = four_of_twelve().part(at(4), S.times(5));
        assert_eq!(part.holes, [(at(0), at(1)), (at(4), at(5))]);
        assert_eq!((part.length(), part.there()), (S.times(5), S.times(3)));
        let later = part.after(S.times(2));
        assert_eq!(later.holes, [(at(2), at(3)), (at(6), at(7))]);
        assert_eq!(later.there(), S.times(5));
    }

    #[test]
    fn a_moment_is_in_a_stay_or_in_a_hole() {
        let holes = four_of_twelve();
        let until: Vec<_> = (0..13).map(|s| holes.stay_until(at(s))).collect();
        let stay = |s: u64| Some(at(s));
        assert_eq!(until[..3], [stay(3); 3]);
        assert_eq!(until[3..5], [None; 2]);
        assert_eq!(until[5..8], [stay(8); 3]);
        assert_eq!(until[8..10], [None; 2]);
        assert_eq!(until[10..], [stay(12), stay(12), None]);
    }

    #[test]
    fn the_same_seed_draws_the_same_and_shares_come_out_as_asked() {
        let evenly = DurationModel::Evenly(S.times(30));
        let day = S.times(86_400);
        let holes = Holes::drawn(1, evenly, DurationModel::Always(S.times(15)), day);
        assert_eq!(
            holes,
            Holes::drawn(1, evenly, DurationModel::Always(S.times(15)), day)
        );
        assert_ne!(
            holes,
            Holes::drawn(2, evenly, DurationModel::Always(S.times(15)), day)
        );
        let share = holes.there().as_secs_f64() / 86_400.0;
        assert!((0.48..0.52).contains(&share), "{share}");
        let none = Holes::drawn(1, evenly, DurationModel::Always(Span::ZERO), day);
        assert_eq!(none, Holes::none(day));
    }

    #[test]
    fn half_are_longer_than_the_median_and_a_tenth_longer_than_that() {
        let (median, tenth) = (S.times(10), S.times(150));
        let mut rng = seeded(1, STREAM);
        let drawn: Vec<Span> = (0..10_000)
            .map(|_| DurationModel::LogNormal { median, tenth }.draw(&mut rng))
            .collect();
        let longer = |than: Span| drawn.iter().filter(|span| **span > than).count();
        assert!(
            (4_800..5_200).contains(&longer(median)),
            "{}",
            longer(median)
        );
        assert!((900..1_100).contains(&longer(tenth)), "{}", longer(tenth));
    }
}
