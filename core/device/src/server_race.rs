//! Which of several servers, each with a key of its own, a new session goes to: the nearest, where round trips that
//! differ little count as equal.
//!
//! ```text
//!  known from before:  nearest ──▶ asked at once ── silent for its turn ──▶ the others are asked, too
//!  never measured:     all are asked at once
//!
//!  answers ─▶ the shortest round trip, and within 30 ms of it the first of the list, once no other can win
//! ```
//!
//! A session cannot move between servers of different keys, so the choice is made before it begins.

use d2tp_time::{Span, Time};

/// Round trips that differ by no more than this count as equal, and the order of the list decides. Lower: the
/// jitter of a Wi-Fi decides. Higher: a server in another country is used though one is near.
pub const RACE_TIE: Span = Span::from_millis(30); // a guess: twice the jitter of a busy Wi-Fi
/// The longest turn of a server that answered before, after which the others are asked, too.
const TURN_MAX: Span = Span::from_millis(250); // RFC 8305 §5
/// What a turn has beside twice the round trip of before.
const TURN_BESIDE: Span = Span::from_millis(50); // a guess: jitter of a Wi-Fi, and a lookup

#[derive(Clone, Copy, Debug)]
struct RaceEntry {
    /// When the server is asked.
    asked_at: Time,
    round_trip: Option<Span>,
    /// Whether no answer will come: the server's name has no address, or its port is closed.
    is_out: bool,
}

/// The choice among servers, from their answers.
#[derive(Clone, Debug)]
pub struct ServerRace {
    entries: Vec<RaceEntry>,
}

impl ServerRace {
    /// Begins a race. `known`: the round trip to each server on this network, where one was measured.
    pub fn new(now: Time, known: &[Option<Span>]) -> ServerRace {
        let first = nearest_server(known);
        let turn = first.and_then(|first| known[first]);
        let turn = turn.map(|trip| (trip.times(2) + TURN_BESIDE).min(TURN_MAX));
        let entry = |(place, known): (usize, &Option<Span>)| RaceEntry {
            asked_at: match (known, turn) {
                (Some(_), Some(turn)) if first != Some(place) => now + turn,
                _ => now,
            },
            round_trip: None,
            is_out: false,
        };
        ServerRace {
            entries: known.iter().enumerate().map(entry).collect(),
        }
    }

    /// When each server is asked, by its place in the list.
    pub fn asked_at(&self) -> impl Iterator<Item = Time> + '_ {
        self.entries.iter().map(|entry| entry.asked_at)
    }

    /// The measured round trips, by place in the list.
    pub fn round_trips(&self) -> Vec<Option<Span>> {
        self.entries.iter().map(|entry| entry.round_trip).collect()
    }

    /// Handles an answer of a server. The shortest of several counts: a server may have nodes, and be asked over
    /// several links.
    pub fn on_answer(&mut self, server: usize, round_trip: Span) {
        if let Some(entry) = self.entries.get_mut(server) {
            let known = entry.round_trip.unwrap_or(round_trip);
            entry.round_trip = Some(known.min(round_trip));
        }
    }

    /// Handles that no answer of a server will come.
    pub fn on_failure(&mut self, server: usize) {
        if let Some(entry) = self.entries.get_mut(server) {
            entry.is_out = true;
        }
    }

    /// The server that is nearest by the answers that there are.
    pub fn leader(&self) -> Option<usize> {
        nearest_server(&self.round_trips())
    }

    /// The server that is used, once no other that was asked can win.
    pub fn winner(&self, now: Time) -> Option<usize> {
        let leader = self.leader()?;
        self.decided_at()
            .is_some_and(|at| at <= now)
            .then_some(leader)
    }

    /// Whether every server has answered, or cannot.
    pub fn is_over(&self) -> bool {
        self.entries
            .iter()
            .all(|entry| entry.is_out || entry.round_trip.is_some())
    }

    /// The servers that have not answered although their turn is over.
    pub fn silent(&self, now: Time) -> Vec<usize> {
        let entries = self.entries.iter().enumerate();
        let silent = entries.filter(|(_, entry)| {
            entry.round_trip.is_none() && (entry.is_out || now.since(entry.asked_at) >= TURN_MAX)
        });
        silent.map(|(place, _)| place).collect()
    }

    /// When the race is decided if nobody else answers; `None` before the first answer.
    pub fn decided_at(&self) -> Option<Time> {
        let leader = self.leader()?;
        let shortest = self
            .entries
            .iter()
            .filter_map(|entry| entry.round_trip)
            .min()?;
        let answered_at = self
            .entries
            .iter()
            .filter_map(|entry| Some(entry.asked_at + entry.round_trip?))
            .min()?;
        let open = self.entries.iter().enumerate().filter(|(_, entry)| {
            // A server whose turn has not come when another answers is not asked.
            entry.round_trip.is_none() && !entry.is_out && entry.asked_at <= answered_at
        });
        let may_win_until = open.map(|(place, entry)| match place < leader {
            true => entry.asked_at + shortest + RACE_TIE,
            // What is later in the list would have to be shorter by more than the tie.
            false => entry.asked_at + shortest.saturating_sub(RACE_TIE),
        });
        Some(may_win_until.max().unwrap_or(answered_at).max(answered_at))
    }
}

/// The place of the nearest: the first whose round trip is within [`RACE_TIE`] of the shortest.
pub fn nearest_server(round_trips: &[Option<Span>]) -> Option<usize> {
    let shortest = round_trips.iter().flatten().min()?;
    let is_near = |trip: &Option<Span>| trip.is_some_and(|trip| trip <= *shortest + RACE_TIE);
    round_trips.iter().position(is_near)
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Time = Time::from_nanos(1_000_000_000);

    fn ms(ms: u64) -> Span {
        Span::from_millis(ms)
    }

    /// The winner and the time of the decision, by when each server answers; its probe is sent in its turn.
    fn race(known: &[Option<u64>], trips: &[Option<u64>]) -> (Option<usize>, u64, Vec<bool>) {
        let known: Vec<Option<Span>> = known.iter().map(|k| k.map(ms)).collect();
        let mut race = ServerRace::new(START, &known);
        let asked: Vec<Time> = race.asked_at().collect();
        for passed in 0..2_000 {
            let now = START + ms(passed);
            for (place, trip) in trips.iter().enumerate() {
                if trip.is_some_and(|trip| asked[place] + ms(trip) == now) {
                    race.on_answer(place, ms(trip.unwrap()));
                }
            }
            if let Some(winner) = race.winner(now) {
                let was_asked = asked.iter().map(|at| *at <= now).collect();
                return (Some(winner), passed, was_asked);
            }
        }
        (None, 2_000, asked.iter().map(|_| true).collect())
    }

    #[test]
    fn the_nearest_wins_and_the_order_of_the_list_breaks_ties() {
        for (trips, winner, decided_ms) in [
            (vec![Some(20), Some(10)], Some(0), 20),
            (vec![Some(40), Some(10)], Some(0), 40),
            (vec![Some(41), Some(10)], Some(1), 40),
            (vec![Some(82), Some(14)], Some(1), 44),
            // The first answers first: a later one would have to be much shorter, and is not.
            (vec![Some(14), Some(82)], Some(0), 14),
            (vec![Some(100), Some(65)], Some(1), 95),
            (vec![Some(100), Some(75)], Some(0), 100),
            (vec![None, Some(10)], Some(1), 40),
            (vec![None, Some(30), Some(10)], Some(1), 40),
            (vec![None, None], None, 2_000),
        ] {
            let (won, at, _) = race(&vec![None; trips.len()], &trips);
            assert_eq!((won, at), (winner, decided_ms), "{trips:?}");
        }
    }

    #[test]
    fn the_nearest_of_before_is_asked_first_and_the_others_when_it_is_silent() {
        // It answers: nobody else is asked, and nothing is waited for.
        let (won, at, asked) = race(&[Some(82), Some(14)], &[Some(82), Some(15)]);
        assert_eq!((won, at, asked), (Some(1), 15, vec![false, true]));
        // It is silent: the other is asked when its turn of 78 ms is over.
        let (won, at, asked) = race(&[Some(82), Some(14)], &[Some(82), None]);
        assert_eq!((won, asked), (Some(0), vec![true, true]));
        assert_eq!(at, 78 + 82);
        // A turn has a limit.
        let (won, at, _) = race(&[Some(900), Some(800)], &[Some(900), None]);
        assert_eq!((won, at >= 1_150), (Some(0), true));
        // One that was never measured is asked at once.
        let (won, _, asked) = race(&[None, Some(60)], &[Some(5), Some(60)]);
        assert_eq!((won, asked), (Some(0), vec![true, true]));
    }

    #[test]
    fn nobody_waits_for_a_server_that_cannot_answer() {
        let mut race = ServerRace::new(START, &[None, None]);
        race.on_failure(0);
        assert!(!race.is_over());
        race.on_answer(1, ms(10));
        assert_eq!(race.winner(START + ms(10)), Some(1));
        assert!(race.is_over());
        assert_eq!(race.silent(START + ms(10)), [0]);
        let mut race = ServerRace::new(START, &[None, None]);
        race.on_failure(0);
        assert_eq!(race.silent(START + ms(249)), [0]);
        assert_eq!(race.silent(START + ms(250)), [0, 1]);
        race.on_failure(1);
        assert!(race.is_over());
        assert_eq!(race.leader(), None);
    }
}
