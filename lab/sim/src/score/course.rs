//! A recorded link as a fluid: its capacity over time.
//!
//! Blank values of a trace are unknown and are read as follows: `up` as in the previous row (down
//! before the first one); a rate while the link is up as in the previous row, zero before the first
//! one. So a trace without upload rates carries no uploads. A link that is up with `loss=1` carries
//! nothing and looks up; any other loss is already part of the rates. After the last row a link is
//! down.

use cedos_lab_link::trace::{self, Trace, TraceRow};
use d2tp_sched::LinkClass;
use d2tp_time::Time;

/// A part of a course with constant values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CourseSegment {
    /// The start of the part.
    pub at: Time,
    /// Whether the link looks up.
    pub up: bool,
    /// The rate in bytes per second.
    pub rate: f64,
}

/// The course of a link over the whole record.
#[derive(Debug, Clone)]
pub struct LinkCourse {
    /// Name of the link, as in the trace.
    pub name: String,
    /// The cost class of the link.
    pub class: LinkClass,
    /// The parts in ascending order; in the last one the link is down.
    pub stretches: Vec<CourseSegment>,
    /// The end of the record.
    pub end: Time,
}

/// The direction of the jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobDirection {
    /// Downloads: bytes to the device.
    Down,
    /// Uploads: bytes from the device.
    Up,
}

/// The courses of a trace's links. Those whose name begins with `wifi`, `wlan` or `eth` are free.
pub fn courses(trace: &Trace, way: JobDirection) -> Vec<LinkCourse> {
    trace
        .ifaces()
        .map(|name| course(name, trace.rows(name).unwrap_or_default(), way))
        .collect()
}

fn course(name: &str, rows: &[TraceRow], way: JobDirection) -> LinkCourse {
    let free = ["wifi", "wlan", "eth"].iter().any(|p| name.starts_with(p));
    let (mut up, mut known) = (false, 0.0);
    let mut stretches: Vec<CourseSegment> = Vec::new();
    for row in rows {
        up = row.up.unwrap_or(up);
        let rate = match way {
            JobDirection::Down => row.down_bps,
            JobDirection::Up => row.up_bps,
        };
        if let Some(rate) = rate {
            known = rate as f64 / 8.0;
        }
        let dead = row.loss.is_some_and(|loss| loss >= 1.0);
        let rate = if up && !dead { known } else { 0.0 };
        let same = |last: &CourseSegment| last.up == up && last.rate == rate;
        if !stretches.last().is_some_and(same) {
            stretches.push(CourseSegment {
                at: row.at,
                up,
                rate,
            });
        }
    }
    let end = Time::ZERO + trace::length(rows);
    stretches.push(CourseSegment {
        at: end,
        up: false,
        rate: 0.0,
    });
    LinkCourse {
        name: name.to_owned(),
        class: if free {
            LinkClass::Free
        } else {
            LinkClass::Metered
        },
        stretches,
        end,
    }
}

impl LinkCourse {
    /// The bytes that the link can carry between two times.
    pub fn bytes_between(&self, from: Time, to: Time) -> f64 {
        let mut bytes = 0.0;
        let first = self.stretches.partition_point(|s| s.at <= from);
        for n in first.saturating_sub(1)..self.stretches.len() {
            let stretch = self.stretches[n];
            if stretch.at >= to {
                break;
            }
            let end = self.stretches.get(n + 1).map_or(to, |next| next.at.min(to));
            bytes += stretch.rate * end.since(stretch.at.max(from)).as_secs_f64();
        }
        bytes
    }

    /// The course with this share of its rates.
    pub fn scaled(&self, share: f64) -> LinkCourse {
        let mut course = self.clone();
        for stretch in &mut course.stretches {
            stretch.rate *= share;
        }
        course
    }
}

/// The end of the shortest record.
pub fn end(courses: &[LinkCourse]) -> Time {
    courses
        .iter()
        .map(|course| course.end)
        .min()
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cedos_lab_link::trace::CSV_HEADER;

    fn read(rows: &str, way: JobDirection) -> Vec<LinkCourse> {
        let trace = Trace::from_csv(&format!("{CSV_HEADER}\n{rows}"));
        courses(&trace.expect("a trace"), way)
    }

    fn carries(course: &LinkCourse, from_s: f64, to_s: f64) -> f64 {
        course.bytes_between(Time::from_secs_f64(from_s), Time::from_secs_f64(to_s))
    }

    #[test]
    fn a_blank_is_as_before_and_nothing_is_assumed_before_the_first() {
        let all = read(
            "0,wifi,1,,,,\n1,wifi,,8,,,\n2,wifi,,,,,\n3,wifi,0,,,,\n",
            JobDirection::Down,
        );
        assert_eq!(all[0].class, LinkClass::Free);
        assert_eq!(carries(&all[0], 0.0, 1.0), 0.0);
        assert_eq!(carries(&all[0], 1.0, 3.0), 2e6);
        assert_eq!(carries(&all[0], 3.0, 9.0), 0.0);
        assert_eq!(all[0].end, Time::from_secs_f64(4.0));
    }

    #[test]
    fn a_link_that_loses_everything_looks_up_and_carries_nothing() {
        let all = read(
            "0,cell,1,8,,,0.5\n1,cell,1,8,,,1\n2,cell,0,8,,,\n",
            JobDirection::Down,
        );
        let seen: Vec<(bool, f64)> = all[0].stretches.iter().map(|s| (s.up, s.rate)).collect();
        assert_eq!(seen[..3], [(true, 1e6), (true, 0.0), (false, 0.0)]);
        assert_eq!(all[0].class, LinkClass::Metered);
    }

    #[test]
    fn without_upload_rates_nothing_is_uploaded() {
        let all = read("0,wifi,1,8,,,\n0,cell,1,8,4,,\n", JobDirection::Up);
        assert_eq!(carries(&all[0], 0.0, 1.0), 0.0);
        assert_eq!(carries(&all[1], 0.0, 1.0), 0.5e6);
    }
}
