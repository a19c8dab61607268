//! Recorded links: the CSV form of this project, and Mahimahi's packet-delivery traces.
//!
//! ```text
//! t_s,iface,up,down_mbps,up_mbps,rtt_ms,loss      one row per change or per bin; blank = unknown
//! 0,wifi,1,18.2,6,23,0
//! 1,wifi,0,,,,
//! ```
//!
//! An additional column, `pos_m`, may contain the device's position along its route.
//!
//! A Mahimahi file has one number per line: the millisecond at which one 1500-byte packet may
//! leave. It repeats after its last line.

use crate::rate::{OPPORTUNITY_BYTES, Opportunities};
use d2tp_time::{Span, Time};
use thiserror::Error;

/// The header every CSV trace begins with.
pub const CSV_HEADER: &str = "t_s,iface,up,down_mbps,up_mbps,rtt_ms,loss";
/// The optional additional column: the device's position.
pub const POS_COLUMN: &str = ",pos_m";
/// The most rows (or opportunities) of a trace.
pub const TRACE_ROWS_MAX: usize = 5_000_000;

/// A trace file that cannot be used, with the number of the faulty line, from 1.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("line {line}: {fault}")]
pub struct TraceFault {
    /// The line at fault.
    pub line: usize,
    /// The error in it and what was expected.
    pub fault: String,
}

/// The state of a link from a time on; `None` is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TraceRow {
    /// The time from which the row is valid.
    pub at: Time,
    /// Whether the link is up.
    pub up: Option<bool>,
    /// Rate towards the device in bits per second.
    pub down_bps: Option<u64>,
    /// Rate from the device in bits per second.
    pub up_bps: Option<u64>,
    /// Round-trip time without queueing.
    pub rtt: Option<Span>,
    /// Loss probability.
    pub loss: Option<f64>,
    /// The position along the route, in metres.
    pub pos_m: Option<f64>,
}

/// A recorded trace of one or more links.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    links: Vec<(String, Vec<TraceRow>)>,
}

impl Trace {
    /// Reads the CSV format.
    ///
    /// # Errors
    /// The first line that is malformed, or whose time is before that of the previous one.
    pub fn from_csv(text: &str) -> Result<Trace, TraceFault> {
        let mut lines = text
            .lines()
            .enumerate()
            .map(|(n, line)| (n + 1, line.trim()));
        let first = lines
            .next()
            .map(|(_, line)| line.trim_start_matches('\u{feff}'));
        let known = first
            .is_some_and(|first| first.strip_suffix(POS_COLUMN).unwrap_or(first) == CSV_HEADER);
        if !known {
            return Err(fault(1, format!("expected the header `{CSV_HEADER}`")));
        }
        let mut trace = Trace::default();
        for (number, line) in lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#')) {
            if number > TRACE_ROWS_MAX {
                return Err(fault(number, format!("more than {TRACE_ROWS_MAX} lines")));
            }
            let (iface, row) = row(line).map_err(|why| fault(number, why))?;
            let rows = match trace.links.iter_mut().find(|(name, _)| name == iface) {
                Some((_, rows)) => rows,
                None => {
                    trace.links.push((iface.to_owned(), Vec::new()));
                    &mut trace.links.last_mut().expect("just pushed").1
                }
            };
            if rows.last().is_some_and(|before| before.at > row.at) {
                return Err(fault(
                    number,
                    format!("t_s goes back for {iface}; sort the file by time"),
                ));
            }
            rows.push(row);
        }
        if trace.links.is_empty() {
            return Err(fault(1, "no rows after the header".to_owned()));
        }
        Ok(trace)
    }

    /// The names in the `iface` column, in order of appearance.
    pub fn ifaces(&self) -> impl Iterator<Item = &str> {
        self.links.iter().map(|(name, _)| name.as_str())
    }

    /// The rows of one link, ascending in time.
    pub fn rows(&self, iface: &str) -> Option<&[TraceRow]> {
        self.links
            .iter()
            .find(|(name, _)| name == iface)
            .map(|(_, rows)| rows.as_slice())
    }
}

/// The length of `rows`: to the last row plus one bin (the last gap between rows).
pub fn length(rows: &[TraceRow]) -> Span {
    match rows {
        [] => Span::ZERO,
        [only] => only.at.since(Time::ZERO) + Span::from_millis(1000),
        [.., before, last] => last.at.since(Time::ZERO) + last.at.since(before.at),
    }
}

/// Reads Mahimahi's format. The trace repeats after its last line, as in `mm-link`.
///
/// # Errors
/// The first line that is not a time in milliseconds at or after the previous one.
pub fn from_mahimahi(text: &str) -> Result<Opportunities, TraceFault> {
    let mut offsets = Vec::new();
    let mut last = 0u64;
    let mut line_last = 1;
    for (index, line) in text.lines().enumerate() {
        let (line, number) = (line.trim(), index + 1);
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let ms: u64 = line.parse().map_err(|_| {
            fault(
                number,
                format!("`{line}` is not a whole number of milliseconds"),
            )
        })?;
        if ms < last {
            return Err(fault(
                number,
                format!("{ms} ms comes after {last} ms; times must ascend"),
            ));
        }
        if offsets.len() == TRACE_ROWS_MAX {
            return Err(fault(
                number,
                format!("more than {TRACE_ROWS_MAX} opportunities"),
            ));
        }
        (last, line_last) = (ms, number);
        offsets.push(Span::from_millis(ms));
    }
    Opportunities::new(offsets, Span::from_millis(last)).ok_or_else(|| {
        let each = OPPORTUNITY_BYTES;
        fault(
            line_last,
            format!("no {each}-byte opportunity after 0 ms: nothing could be sent"),
        )
    })
}

fn row(line: &str) -> Result<(&str, TraceRow), String> {
    let cells: Vec<&str> = line.split(',').map(str::trim).collect();
    let [t, iface, up, down, upward, rtt, loss, ref beyond @ ..] = cells[..] else {
        return Err(format!(
            "{} columns instead of 7 (`{CSV_HEADER}`)",
            cells.len()
        ));
    };
    let pos_m = match beyond {
        [] => None,
        [pos_m] => number("pos_m", pos_m)?,
        _ => {
            return Err(format!(
                "{} columns, at most 8 (`{CSV_HEADER}{POS_COLUMN}`)",
                cells.len()
            ));
        }
    };
    if iface.is_empty() {
        return Err("the iface column is empty".to_owned());
    }
    let t = number("t_s", t)?.ok_or("t_s is empty")?;
    let up = match number("up", up)? {
        None => None,
        Some(0.0) => Some(false),
        Some(1.0) => Some(true),
        Some(other) => return Err(format!("up is {other}, expected 0, 1 or a blank")),
    };
    let loss = number("loss", loss)?;
    if loss.is_some_and(|p| p > 1.0) {
        return Err("loss is above 1; it is a share, not a percentage".to_owned());
    }
    let bps = |mbps: f64| (mbps * 1e6).round() as u64;
    Ok((
        iface,
        TraceRow {
            at: Time::from_secs_f64(t),
            up,
            down_bps: number("down_mbps", down)?.map(bps),
            up_bps: number("up_mbps", upward)?.map(bps),
            rtt: number("rtt_ms", rtt)?.map(Span::from_millis_f64),
            loss,
            pos_m,
        },
    ))
}

fn number(column: &str, cell: &str) -> Result<Option<f64>, String> {
    if cell.is_empty() {
        return Ok(None);
    }
    match cell.parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(Some(value)),
        Ok(value) => Err(format!("{column} is {value}, expected 0 or more")),
        Err(_) => Err(format!(
            "{column} is `{cell}`, expected a number or a blank"
        )),
    }
}

fn fault(line: usize, fault: String) -> TraceFault {
    TraceFault { line, fault }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blanks_are_unknown_and_links_are_kept_apart() {
        let text =
            format!("{CSV_HEADER}\n0,wifi,1,18.2,6,23.5,0\n0,cell,,,,,\n1.5,wifi,0,,,,0.25\n");
        let trace = Trace::from_csv(&text).unwrap();
        assert_eq!(trace.ifaces().collect::<Vec<_>>(), ["wifi", "cell"]);
        let wifi = trace.rows("wifi").unwrap();
        assert_eq!(wifi[0].down_bps, Some(18_200_000));
        assert_eq!(wifi[0].rtt, Some(Span::from_millis_f64(23.5)));
        assert_eq!(
            wifi[1],
            TraceRow {
                at: Time::from_secs_f64(1.5),
                up: Some(false),
                loss: Some(0.25),
                ..TraceRow::default()
            }
        );
        assert_eq!(trace.rows("cell").unwrap(), [TraceRow::default()]);
        assert_eq!(length(wifi), Span::from_millis(3000));
    }

    #[test]
    fn a_fault_names_its_line_and_column() {
        let bad = |rows: &str| {
            Trace::from_csv(&format!("{CSV_HEADER}\n{rows}"))
                .unwrap_err()
                .to_string()
        };
        assert_eq!(
            bad("0,wifi,1,fast,,,"),
            "line 2: down_mbps is `fast`, expected a number or a blank"
        );
        assert_eq!(
            bad("0,wifi,1,,,,\n0,wifi"),
            "line 3: 2 columns instead of 7 (`t_s,iface,up,down_mbps,up_mbps,rtt_ms,loss`)"
        );
        assert_eq!(
            bad("0,wifi,1,,,,3"),
            "line 2: loss is above 1; it is a share, not a percentage"
        );
        assert_eq!(
            bad("5,wifi,1,,,,\n1,wifi,1,,,,"),
            "line 3: t_s goes back for wifi; sort the file by time"
        );
        assert!(Trace::from_csv("").is_err());
    }

    #[test]
    fn a_mahimahi_trace_gives_one_packet_per_line() {
        let o = from_mahimahi("1\n1\n5\n10\n").unwrap();
        let rate = crate::Rate::Opportunities(o);
        assert_eq!(rate.bits_per_second(), Some(4 * 1500 * 8 * 100));
        assert_eq!(from_mahimahi("3\n2\n").unwrap_err().line, 2);
        assert!(from_mahimahi("0\n").is_err());
        assert!(from_mahimahi("x\n").is_err());
    }
}
