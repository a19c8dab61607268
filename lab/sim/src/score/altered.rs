//! Altered traces, to check that a policy uses no knowledge that it should not have: reversed in
//! time, one link shifted against the other, or free links of one trace with metered ones of the
//! next.

use super::course::{self, CourseSegment, LinkCourse};
use d2tp_sched::LinkClass;
use d2tp_time::{Span, Time};

/// The course reversed in time.
pub fn reversed(course: &LinkCourse) -> LinkCourse {
    let mut ends: Vec<Time> = course.stretches.iter().map(|s| s.at).collect();
    ends.remove(0);
    let mut stretches: Vec<CourseSegment> = course
        .stretches
        .iter()
        .zip(ends)
        .map(|(stretch, end)| CourseSegment {
            at: Time::ZERO + course.end.since(end),
            ..*stretch
        })
        .collect();
    stretches.reverse();
    stretches.push(ended(course.end));
    LinkCourse {
        stretches,
        ..course.clone()
    }
}

/// The course shifted by `by`: what is before moves to the end.
pub fn shifted(course: &LinkCourse, by: Span) -> LinkCourse {
    let at = Time::ZERO + by;
    let stretches = &course.stretches[..course.stretches.len() - 1];
    let cut = stretches.partition_point(|s| s.at <= at).max(1);
    let first = CourseSegment {
        at: Time::ZERO,
        ..stretches[cut - 1]
    };
    let later = stretches[cut..].iter().map(|s| CourseSegment {
        at: Time::ZERO + s.at.since(at),
        ..*s
    });
    let rest = course.end.since(at);
    let earlier = stretches[..cut].iter().map(|s| CourseSegment {
        at: s.at + rest,
        ..*s
    });
    let all = std::iter::once(first).chain(later).chain(earlier);
    LinkCourse {
        stretches: all.chain([ended(course.end)]).collect(),
        ..course.clone()
    }
}

/// The free links of one trace with the metered ones of another.
pub fn recombined(free: &[LinkCourse], metered: &[LinkCourse]) -> Vec<LinkCourse> {
    let of = |courses: &[LinkCourse], is_free: bool| -> Vec<LinkCourse> {
        let wanted = |course: &&LinkCourse| (course.class == LinkClass::Free) == is_free;
        courses.iter().filter(wanted).cloned().collect()
    };
    let mut all = of(free, true);
    all.extend(of(metered, false));
    all
}

/// The courses with free links shifted by half of their length.
pub fn apart(courses: &[LinkCourse]) -> Vec<LinkCourse> {
    let half = course::end(courses).since(Time::ZERO).divided(2);
    courses
        .iter()
        .map(|course| match course.class {
            LinkClass::Free => shifted(course, half),
            LinkClass::Metered | LinkClass::Roaming => course.clone(),
        })
        .collect()
}

fn ended(at: Time) -> CourseSegment {
    CourseSegment {
        at,
        up: false,
        rate: 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2 B/s for 3 s, nothing for 1 s, 5 B/s for 6 s.
    fn course() -> LinkCourse {
        let stretch = |s, up, rate| CourseSegment {
            at: Time::from_secs_f64(s),
            up,
            rate,
        };
        LinkCourse {
            name: "wifi".to_owned(),
            class: LinkClass::Free,
            stretches: vec![
                stretch(0.0, true, 2.0),
                stretch(3.0, false, 0.0),
                stretch(4.0, true, 5.0),
                stretch(10.0, false, 0.0),
            ],
            end: Time::from_secs_f64(10.0),
        }
    }

    fn carries(course: &LinkCourse, from_s: f64, to_s: f64) -> f64 {
        course.bytes_between(Time::from_secs_f64(from_s), Time::from_secs_f64(to_s))
    }

    #[test]
    fn a_reversed_course_carries_the_same_the_other_way_round() {
        let reversed = reversed(&course());
        assert_eq!(carries(&reversed, 0.0, 6.0), 30.0);
        assert_eq!(carries(&reversed, 6.0, 7.0), 0.0);
        assert_eq!(carries(&reversed, 7.0, 10.0), 6.0);
        assert_eq!(carries(&reversed, 10.0, 99.0), 0.0);
    }

    #[test]
    fn a_shifted_course_carries_what_came_later_first() {
        let shifted = shifted(&course(), Span::from_secs(5));
        assert_eq!(carries(&shifted, 0.0, 5.0), 25.0);
        assert_eq!(carries(&shifted, 5.0, 8.0), 6.0);
        assert_eq!(carries(&shifted, 8.0, 9.0), 0.0);
        assert_eq!(carries(&shifted, 9.0, 10.0), 5.0);
    }
}
