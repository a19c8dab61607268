//! Every result of the five papers that is to be reproduced, and what belongs beside them.

use super::{
    applications, blackouts, bufferbloat, bulk, energy, fairness, far, holes, losses, mobility,
    offload, plane,
    plot::Chart,
    podcasts, prediction, proxy,
    runner::{Measured, RowVenue},
    schedules, subway, switching, two_paths, unmodified, video, waiting, walk,
};
use serde_json::Value;

/// Runs a row in one place.
pub type Runner = fn() -> anyhow::Result<Measured>;

/// Draws a row's figures: ours, and those we compare with.
pub type Charts = fn(&Value, &Value) -> Vec<Chart>;

/// Puts a row's figures, ours and others', into a table that people read.
pub type RowTable = fn(&Value, &Value) -> String;

/// A result of one of the papers.
pub struct PaperRow {
    /// `C`: Cedos, `M`: multipath mobility, `D`: DRWA, `E`: Epsilon, `S`: super-aggregation; a word: none
    /// of them, and yet to be shown beside them.
    pub id: &'static str,
    /// What is claimed.
    pub claim: &'static str,
    /// What the authors measured, and where their own figures do not fit together.
    pub paper: &'static str,
    /// Where it can be run here.
    pub runners: &'static [(RowVenue, Runner)],
    /// How it is drawn, if it is.
    pub charts: Option<Charts>,
    /// How `ours.table` and `baseline.table` are printed, if it has them.
    pub table: Option<RowTable>,
}

impl PaperRow {
    const fn drawn_by(mut self, charts: Charts) -> PaperRow {
        self.charts = Some(charts);
        self
    }

    const fn tabled_by(mut self, table: RowTable) -> PaperRow {
        self.table = Some(table);
        self
    }
}

/// The row of this name, in any case.
pub fn find(id: &str) -> Option<&'static PaperRow> {
    ROWS.iter().find(|row| row.id.eq_ignore_ascii_case(id))
}

const fn row(
    id: &'static str,
    claim: &'static str,
    paper: &'static str,
    runners: &'static [(RowVenue, Runner)],
) -> PaperRow {
    PaperRow {
        id,
        claim,
        paper,
        runners,
        charts: None,
        table: None,
    }
}

/// Every result, paper by paper.
pub static ROWS: &[PaperRow] = &[
    row(
        "C1",
        "bulk throughput beside TCP, UDT and a DTN stack",
        "comparable; slightly more CPU (5 % more power at 9.7 Mb/s)",
        &[(RowVenue::Lab, bulk::emulate)],
    ),
    row(
        "C2",
        "fairness: Jain's index of 100 TCP, 100 D2TP, 50 + 50 flows on one bottleneck",
        "comparable to TCP",
        &[(RowVenue::Lab, fairness::emulate)],
    ),
    row(
        "C3",
        "switching delay, from the last data on the old network to the first on the new",
        "LTE to Wi-Fi 27-141 ms (mean 45); Wi-Fi to LTE 440-856 ms (mean 581, of which 88 ms authentication)",
        &[
            (RowVenue::Sim, switching::simulate),
            (RowVenue::Lab, switching::emulate),
        ],
    ),
    row(
        "C4a",
        "100 MB in 5 min over Wi-Fi at 0.8 Mb/s and cellular at 4.7 Mb/s: as much by Wi-Fi as possible",
        "deadline met, 16 % by Wi-Fi (the optimum is 15.6 %, not the paper's 17 %)",
        &[
            (RowVenue::Sim, schedules::poor_wifi),
            (RowVenue::Lab, schedules::lab::poor_wifi),
        ],
    ),
    row(
        "C4b",
        "10 downloads of 100 MB in 30 min over cellular at 4.7 Mb/s, scheduled together",
        "all in time; each by itself, none",
        &[
            (RowVenue::Sim, schedules::cellular_alone),
            (RowVenue::Lab, schedules::lab::cellular_alone),
        ],
    ),
    row(
        "C4c",
        "9 downloads in 30 min and one in 5 min over Wi-Fi at 6.3 Mb/s",
        "all in time; sharing evenly, the urgent one is late",
        &[
            (RowVenue::Sim, schedules::one_urgent),
            (RowVenue::Lab, schedules::lab::one_urgent),
        ],
    ),
    row(
        "C5",
        "power while waiting for Wi-Fi, against holding the device awake",
        "55.1 mW scanning every 2 min; asleep 43 mW, held awake 231.9 mW",
        &[(RowVenue::Sim, waiting::simulate)],
    )
    .drawn_by(waiting::charts),
    row(
        "C6",
        "a proxy with 65,536 flows, 10 % a minute going silent and coming back",
        "line rate (10 Gb/s), Jain's index above 0.9",
        &[(RowVenue::Lab, proxy::churn)],
    ),
    row(
        "C7",
        "video at 640 kb/s on a subway, receive-buffer thresholds 200 kB and 3 MB",
        "48.7 % by Wi-Fi without a pause (at 640 kb/s its own figures give more; 780 kb/s fits)",
        &[
            (RowVenue::Sim, subway::simulate),
            (RowVenue::Lab, subway::emulate),
        ],
    )
    .drawn_by(subway::charts),
    row(
        "C8",
        "a field study of podcast downloads with deadlines of 0-6 h",
        "92.4 % by Wi-Fi: 79.5 % without delay, 93 % at tens of minutes, 99.5 % above 3 h; 38 % of bytes saved from being fetched again",
        &[(RowVenue::Sim, podcasts::simulate)],
    )
    .drawn_by(podcasts::charts),
    row(
        "C9",
        "state of sleeping flows in the proxy",
        "a million flows in less than 1 GB",
        &[(RowVenue::Lab, proxy::asleep)],
    ),
    row(
        "C10",
        "what applications do on disruption and delay",
        "most of 21 applications fail",
        &[(RowVenue::Lab, applications::emulate)],
    )
    .tabled_by(applications::table),
    row(
        "C11",
        "what porting an application costs",
        "nginx 55, Firefox 123, VLC 61 lines",
        &[(RowVenue::Lab, unmodified::emulate)],
    ),
    row(
        "M1",
        "several paths at once against a clairvoyant single path",
        "622 against 554 MB indoors (622 is the sum of both links); typically 10-15 % more",
        &[
            (RowVenue::Sim, mobility::simulate),
            (RowVenue::Lab, mobility::on_real_sockets),
        ],
    )
    .drawn_by(mobility::charts),
    row(
        "M2",
        "energy: probe both links for 10 s, then the better one for 100 s",
        "1.55 Mb/J at 2.37 Mb/s walking; driving, worse than 3G alone",
        &[(RowVenue::Sim, plane::simulate)],
    )
    .drawn_by(plane::charts),
    row(
        "D1",
        "round trip time with DRWA on bloated cellular links",
        "49, 35, 49 and 24 % less at a throughput within 4 %; a web object beside a download 39 % faster",
        &[
            (RowVenue::Sim, bufferbloat::in_virtual_time),
            (RowVenue::Lab, bufferbloat::on_real_sockets),
        ],
    ),
    row(
        "D2",
        "throughput with DRWA on long fat paths",
        "up to 51 % more at 131-798 ms than with a receive buffer of fixed size",
        &[
            (RowVenue::Sim, far::in_virtual_time),
            (RowVenue::Lab, far::on_real_sockets),
        ],
    ),
    row(
        "E1",
        "TCP through holes in Wi-Fi with a bridge of 115 kb/s",
        "6 times over a month's trace; 1.2-13.8 times on synthetic holes (13.8 does not fit its own figure 9)",
        &[(RowVenue::Sim, holes::simulate), (RowVenue::Lab, holes::emulate)],
    ),
    row(
        "E2",
        "the web and UDP through holes",
        "1187 pages instead of 796, 61 timeouts instead of 203",
        &[],
    ),
    row(
        "E3",
        "predicting the length of a hole",
        "median error below 5 s",
        &[(RowVenue::Sim, prediction::simulate)],
    )
    .drawn_by(prediction::charts),
    row(
        "S1",
        "acknowledgements over the other radio",
        "37 % more on 802.11g, 152 % on 802.11b",
        &[
            (RowVenue::Sim, offload::simulate),
            (RowVenue::Lab, offload::on_real_sockets),
        ],
    ),
    row(
        "S2",
        "freezing across blackouts",
        "87, 136 and 161 % more, nearly ideal",
        &[
            (RowVenue::Sim, blackouts::simulate),
            (RowVenue::Lab, blackouts::on_real_sockets),
        ],
    )
    .drawn_by(blackouts::charts),
    row(
        "S3",
        "random losses fetched over the other radio",
        "nearly loss-free up to 3 %; 175 % more at a round trip of 200 ms",
        &[
            (RowVenue::Sim, losses::simulate),
            (RowVenue::Lab, losses::on_real_sockets),
        ],
    )
    .drawn_by(losses::charts),
    row(
        "S4",
        "all three together, walking past three access points",
        "189 % more",
        &[
            (RowVenue::Sim, walk::simulate),
            (RowVenue::Lab, walk::on_real_sockets),
        ],
    ),
    row(
        "S5",
        "energy to download 10 MB",
        "65.69 J with offloaded acknowledgements, TCP 65.82, simple aggregation 79.51",
        &[(RowVenue::Sim, energy::simulate)],
    ),
    row(
        "video",
        "reports over the steadier link, commands and base layers on both, for a video that adapts its rate",
        "described (super-aggregation, section 5), not measured",
        &[(RowVenue::Sim, video::simulate)],
    ),
    row(
        "two-paths",
        "two paths at once, rates 1:1 and 10:1, round trips 1:1, 1:10 and 10:1: the sum of both",
        "in none of the papers; kernel MPTCP is what today offers",
        &[
            (RowVenue::Sim, two_paths::in_virtual_time),
            (RowVenue::Lab, two_paths::on_real_sockets),
        ],
    )
    .drawn_by(two_paths::charts),
];

#[cfg(test)]
mod tests {
    use super::{ROWS, find};

    #[test]
    fn every_row_has_a_name_of_its_own() {
        for (n, row) in ROWS.iter().enumerate() {
            assert!(ROWS[..n].iter().all(|other| other.id != row.id));
        }
    }

    #[test]
    fn rows_are_found_in_either_case() {
        assert_eq!(find("c4A").map(|row| row.id), Some("C4a"));
        assert!(find("C99").is_none());
    }
}
