//! The grid's figures: medians per cell and peer, and their requirements, as a table or JSON.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use crate::bottleneck::BottleneckShape;
use crate::median::{median, spread};

/// The name of D2TP, with which the other peers are compared.
const OURS: &str = "d2tp";
const AGAINST: &str = "tcp";
/// How much slower D2TP may be if losses are congestion.
const TOLERANCE: f64 = 0.05;
/// The payload of a full TCP segment as a fraction of its packet: 1,448 of 1,500 bytes.
const TCP_PAYLOAD: f64 = 1448.0 / 1500.0;
/// From this share of the link's rate, random loss does not limit a peer, and no other can be
/// better.
const FULL: f64 = 0.98;

/// The bottleneck's round trip, loss and queue, in thousandths so that they can be ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GridCell {
    rtt_us: u64,
    loss_ppm: u64,
    queue_thousandths: u64,
}

impl GridCell {
    /// The cell of a bottleneck.
    pub fn of(shape: &BottleneckShape) -> GridCell {
        let whole = |x: f64| x.round() as u64;
        GridCell {
            rtt_us: whole(shape.rtt_ms * 1e3),
            loss_ppm: whole(shape.loss * 1e6),
            queue_thousandths: whole(shape.queue_bdp * 1e3),
        }
    }

    fn rtt_ms(&self) -> f64 {
        self.rtt_us as f64 / 1e3
    }
    fn loss_percent(&self) -> f64 {
        self.loss_ppm as f64 / 1e4
    }
    fn queue_bdp(&self) -> f64 {
        self.queue_thousandths as f64 / 1e3
    }
}

/// One peer in one cell.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GridRow {
    rtt_ms: f64,
    loss_percent: f64,
    queue_bdp: f64,
    peer: String,
    /// The median payload rate.
    mbps: f64,
    rounds: Vec<f64>,
}

/// The machine-readable result.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GridJson {
    /// Rate of each bottleneck.
    mbps: f64,
    seconds: f64,
    warm_up: f64,
    rows: Vec<GridRow>,
    /// The cells in which D2TP misses its requirement.
    missed: Vec<String>,
    cells: usize,
    holds: bool,
}

/// All figures so far.
#[derive(Debug)]
pub struct Grid {
    mbps: f64,
    seconds: f64,
    warm_up: f64,
    peers: Vec<String>,
    cells: BTreeMap<GridCell, BTreeMap<String, Vec<f64>>>,
}

impl Grid {
    /// Creates an empty grid.
    pub fn new(mbps: f64, seconds: f64, warm_up: f64) -> Self {
        Self {
            mbps,
            seconds,
            warm_up,
            peers: Vec::new(),
            cells: BTreeMap::new(),
        }
    }

    /// Adds a measurement.
    pub fn add(&mut self, cell: GridCell, peer: &str, mbps: f64) {
        if !self.peers.iter().any(|known| known == peer) {
            self.peers.push(peer.to_owned());
        }
        let of_cell = self.cells.entry(cell).or_default();
        of_cell.entry(peer.to_owned()).or_default().push(mbps);
    }

    /// Adds an earlier result.
    ///
    /// # Errors
    /// It was of another grid.
    pub fn take_in(&mut self, json: GridJson) -> Result<()> {
        ensure!(
            (json.mbps, json.seconds, json.warm_up) == (self.mbps, self.seconds, self.warm_up),
            "these results are of bottlenecks of {} Mb/s, counted for {} s after {} s, and this grid's \
             are not",
            json.mbps,
            json.seconds,
            json.warm_up
        );
        for row in json.rows {
            let cell = GridCell::of(&BottleneckShape {
                mbps: json.mbps,
                rtt_ms: row.rtt_ms,
                loss: row.loss_percent / 100.0,
                queue_bdp: row.queue_bdp,
            });
            for mbps in row.rounds {
                self.add(cell, &row.peer, mbps);
            }
        }
        Ok(())
    }

    fn figure(&self, cell: &GridCell, peer: &str) -> Option<f64> {
        let rounds = self.cells.get(cell)?.get(peer)?;
        Some(median(rounds.iter().copied()))
    }

    /// D2TP's rate divided by that of the kernel's CUBIC in a cell, and whether that is sufficient.
    fn judged(&self, cell: &GridCell) -> Option<(f64, bool)> {
        let theirs = self.figure(cell, AGAINST)?;
        let ratio = self.figure(cell, OURS)? / theirs;
        let full = theirs >= FULL * TCP_PAYLOAD * self.mbps;
        let enough = if cell.loss_ppm == 0 || full {
            ratio >= 1.0 - TOLERANCE
        } else {
            ratio > 1.0
        };
        Some((ratio, enough))
    }

    /// The result for JSON.
    pub fn to_json(&self) -> GridJson {
        let rows = self.cells.iter().flat_map(|(cell, peers)| {
            self.peers.iter().filter_map(|peer| {
                let rounds = peers.get(peer)?.clone();
                Some(GridRow {
                    rtt_ms: cell.rtt_ms(),
                    loss_percent: cell.loss_percent(),
                    queue_bdp: cell.queue_bdp(),
                    peer: peer.clone(),
                    mbps: median(rounds.iter().copied()),
                    rounds,
                })
            })
        });
        let judged: Vec<_> = (self.cells.keys())
            .filter_map(|cell| Some((cell, self.judged(cell)?)))
            .collect();
        let missed: Vec<_> = judged
            .iter()
            .filter(|(_, (_, enough))| !enough)
            .map(|(cell, (ratio, _))| {
                format!(
                    "RTT {} ms, loss {} %, queue {} BDP: {ratio:.2} of {AGAINST}",
                    cell.rtt_ms(),
                    cell.loss_percent(),
                    cell.queue_bdp()
                )
            })
            .collect();
        GridJson {
            mbps: self.mbps,
            seconds: self.seconds,
            warm_up: self.warm_up,
            rows: rows.collect(),
            holds: missed.is_empty() && !judged.is_empty(),
            cells: judged.len(),
            missed,
        }
    }
}

impl fmt::Display for Grid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rounds = self.cells.values().flat_map(BTreeMap::values).map(Vec::len);
        let (least, most) = spread(rounds.map(|n| n as f64));
        writeln!(
            f,
            "One flow over {} Mb/s (whole IP packets), payload Mb/s counted for {} s, {} s after its \
             first byte;\nmedians of {least} to {most} rounds; random loss strikes data only. `÷ tcp` \
             is ours with CUBIC over the\nkernel's: at least {} where nothing is lost at random or the \
             kernel's fills {} % of the link all the same, above\n1 elsewhere; `!` marks where it is not.\n",
            self.mbps,
            self.seconds,
            self.warm_up,
            1.0 - TOLERANCE,
            FULL * 100.0,
        )?;
        write!(f, "| RTT ms | loss % | queue BDP |")?;
        for peer in &self.peers {
            write!(f, " {peer} |")?;
        }
        writeln!(f, " ÷ tcp |")?;
        writeln!(
            f,
            "|---:|---:|---:|{}---:|",
            "---:|".repeat(self.peers.len())
        )?;
        for cell in self.cells.keys() {
            write!(
                f,
                "| {} | {} | {} |",
                cell.rtt_ms(),
                cell.loss_percent(),
                cell.queue_bdp()
            )?;
            for peer in &self.peers {
                match self.figure(cell, peer) {
                    Some(mbps) => write!(f, " {mbps:.2} |")?,
                    None => write!(f, " - |")?,
                }
            }
            match self.judged(cell) {
                Some((ratio, true)) => writeln!(f, " {ratio:.2} |")?,
                Some((ratio, false)) => writeln!(f, " {ratio:.2} ! |")?,
                None => writeln!(f, " - |")?,
            }
        }
        let json = self.to_json();
        writeln!(f, "\n{} of {} cells missed.", json.missed.len(), json.cells)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(loss: f64) -> BottleneckShape {
        BottleneckShape {
            mbps: 20.0,
            rtt_ms: 50.0,
            loss,
            queue_bdp: 0.5,
        }
    }

    fn grid(loss: f64, ours: &[f64], theirs: &[f64]) -> Grid {
        let mut grid = Grid::new(20.0, 10.0, 2.0);
        let cell = GridCell::of(&shape(loss));
        ours.iter().for_each(|mbps| grid.add(cell, OURS, *mbps));
        theirs
            .iter()
            .for_each(|mbps| grid.add(cell, AGAINST, *mbps));
        grid
    }

    #[test]
    fn a_twentieth_less_is_allowed_unless_random_loss_holds_the_kernel_back() {
        assert!(grid(0.0, &[18.1], &[19.0]).to_json().holds);
        assert!(!grid(0.0, &[18.0], &[19.0]).to_json().holds);
        assert!(!grid(0.001, &[17.9], &[18.0]).to_json().holds);
        assert!(grid(0.001, &[18.1], &[18.0]).to_json().holds);
        // The link is full: 19.3 is the maximum.
        assert!(grid(0.001, &[18.9], &[19.2]).to_json().holds);
        assert!(!Grid::new(20.0, 10.0, 2.0).to_json().holds);
    }

    #[test]
    fn results_of_several_runs_are_one_grid() {
        let mut first = grid(0.01, &[5.0, 9.0], &[4.0]);
        let second = serde_json::to_string(&grid(0.01, &[6.0], &[8.0]).to_json()).unwrap();
        first
            .take_in(serde_json::from_str(&second).unwrap())
            .unwrap();
        let json = first.to_json();
        assert_eq!(json.rows[0].mbps, 6.0);
        assert_eq!(json.rows[1].mbps, 6.0);
        assert_eq!(json.missed.len(), 1, "equal is not better");
        assert!(first.to_string().contains("1.00 !"), "{first}");
        let other = Grid::new(50.0, 10.0, 2.0).to_json();
        assert!(first.take_in(other).is_err());
    }
}
