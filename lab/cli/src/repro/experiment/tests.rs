//! Tests of the rows' files without running them.

use super::measured;
use super::row_file::ResultRow;
use super::runs::PlannedRun;
use super::source_files::SourceFiles;
use crate::repro::reproduced::{self, Reproduced};
use crate::repro::rows;
use crate::repro::runner::RowVenue;
use cedos_lab_scenario::Scenario;
use serde_json::{Value, json};

/// The result of a row whose runs have these reports.
fn judged(
    id: &str,
    venue: RowVenue,
    report: impl Fn(&PlannedRun<'_>) -> Value,
) -> anyhow::Result<Reproduced> {
    let row = rows::find(id).unwrap();
    judged_row(row, venue, report)
}

fn judged_row(
    row: &ResultRow,
    venue: RowVenue,
    report: impl Fn(&PlannedRun<'_>) -> Value,
) -> anyhow::Result<Reproduced> {
    let reports = |planned: &[PlannedRun<'_>]| Ok(planned.iter().map(report).collect());
    let experiment = reproduced::experiment(row, venue)?;
    let measured = measured(experiment, &SourceFiles::default(), None, reports)?;
    reproduced::judge(row, venue, measured)
}

#[test]
fn every_scenario_of_every_row_is_one() {
    let files = SourceFiles::default();
    let mut parsed = 0;
    for row in rows::all() {
        for (venue, experiment) in &row.venues {
            if experiment.runner.is_some() {
                continue;
            }
            let at = format!("{} {}", row.id, venue.word());
            let stopped = measured(experiment, &files, None, |planned| {
                for run in planned.iter().filter(|run| !run.scenario.is_empty()) {
                    let scenario =
                        Scenario::parse(&at, &run.scenario, &mut |name| files.open(name));
                    scenario.unwrap_or_else(|fault| panic!("{fault}: {}", run.scenario));
                    parsed += 1;
                }
                anyhow::bail!("nothing is run")
            });
            assert_eq!(stopped.unwrap_err().to_string(), "nothing is run", "{at}");
        }
    }
    assert!(parsed > 200, "{parsed}");
}

#[test]
fn every_figure_of_every_row_can_be_computed() {
    let mut judged = 0;
    for row in rows::all() {
        for (venue, experiment) in &row.venues {
            if experiment.runner.is_some() || !experiment.bench.is_empty() {
                continue;
            }
            let report = |_: &PlannedRun<'_>| {
                let mut report = download(1e7, 1.0, json!({"wlan0": 6, "wwan0": 4}));
                report["flows"][0]["id"] = json!("bulk");
                let object = json!({"id": "object-0", "finished_s": 16.0});
                report["flows"].as_array_mut().unwrap().push(object);
                let link = |name: &str| {
                    json!({"name": name, "bytes_up": 1, "bytes_down": 1, "packets_while_down": 0,
                           "wait_down_ms": 1, "wait_up_ms": 1})
                };
                report["links"] = json!([link("wlan0"), link("wwan0")]);
                let switch =
                    |kind: &str, to: &str| json!({"kind": kind, "to": to, "silence_ms": 1});
                let switches = (0..100).flat_map(|_| {
                    [
                        switch("make-before-break", "wlan0"),
                        switch("break-before-make", "wwan0"),
                    ]
                });
                report["switches"] = switches.collect();
                report["podcasts"] = json!({"in_time_share": 1.0, "heard_whole_share": 1.0, "free_share": 0.9,
                    "optimum_free_share": 1.0, "restart_share": 0.1, "switches": 3});
                report["energy"] = json!({"joules": 10.0, "mbps": 1.0, "mbit_per_joule": 1.0});
                report
            };
            let at = format!("{} {}", row.id, venue.word());
            let told =
                judged_row(row, *venue, report).unwrap_or_else(|fault| panic!("{at}: {fault:#}"));
            assert!(told.ours.is_object() && !told.mark.is_empty(), "{at}");
            reproduced::charts(row, &told).unwrap_or_else(|fault| panic!("{at}: {fault:#}"));
            judged += 1;
        }
    }
    assert!(judged >= 14, "{judged}");
}

/// A report of one download, with its first byte at 0 s.
fn download(bytes: f64, last_byte_s: f64, by_link: Value) -> Value {
    let flow = json!({"id": "0", "bytes": bytes, "sha256_ok": true, "first_byte_s": 0.0,
                      "last_byte_s": last_byte_s, "bytes_by_link": by_link, "duplicate_bytes": 0});
    let links = json!([{"name": "wlan0"}, {"name": "wlan1"}]);
    json!({"flows": [flow], "links": links, "switches": [], "rtt_ms": 20, "duration_s": 120})
}

#[test]
fn blackouts_hold_from_nineteen_twentieths_of_the_ideal_on() {
    let holds = |share: f64| {
        let report = |run: &PlannedRun<'_>| {
            let there = match run.variant.name.as_str() {
                "whole" => 1.0,
                _ => share * (1.0 - run.named["blackout_s"].as_f64().unwrap() / 20.0),
            };
            download(0.0, 1.0, json!({"wlan0": 1e8 * there}))
        };
        judged("S2", RowVenue::Sim, report).unwrap()
    };
    let good = holds(0.96);
    assert!(good.holds);
    assert_eq!(good.ours["cases"].as_array().unwrap().len(), 8);
    assert_eq!(good.ours["cases"][3]["blackout_s"], 10);
    assert!((good.ours["cases"][3]["ideal_mbps"].as_f64().unwrap() - 4.0).abs() < 1e-9);
    assert!(!holds(0.94).holds);
}

#[test]
fn two_paths_hold_from_nine_tenths_of_the_sum_on_and_never_below_the_better_path() {
    let holds = |of_sum: f64, alone_of_sum: f64| {
        let report = |run: &PlannedRun<'_>| {
            let share = if run.variant.name == "better" {
                alone_of_sum
            } else {
                of_sum
            };
            let mbps = run.named["sum_mbps"].as_f64().unwrap() * share;
            download(mbps * 1e6 / 8.0, 1.0, json!({"wlan0": 1, "wlan1": 1}))
        };
        judged("two-paths", RowVenue::Sim, report).unwrap().holds
    };
    assert!(holds(0.91, 0.5));
    assert!(!holds(0.89, 0.5));
    assert!(!holds(0.93, 0.94));
}

#[test]
fn two_paths_on_real_sockets_of_which_one_carried_nothing_are_no_run() {
    let run = |other: u64| {
        judged("two-paths", RowVenue::Lab, |_| {
            download(1e7, 1.0, json!({"wlan0": 9, "wlan1": other}))
        })
    };
    assert!(run(1).is_ok());
    let fault = format!("{:#}", run(0).unwrap_err());
    assert!(fault.contains("is not true of its report"), "{fault}");
}

/// Test reports: 250 MB, with TCP at 10 Mb/s and 0.2 s of processor time, UDT at 9; no DTN stack.
fn bulk(run: &PlannedRun<'_>, fast: (f64, f64), slow: (f64, f64)) -> Value {
    let row = |peer: &str, mbps: f64, cpu: f64| json!({"peer": peer, "mbps": mbps, "seconds": 20, "rcv_cpu_s": cpu, "snd_cpu_s": cpu});
    let (mbps, cpu) = if run.variant.name == "fast" {
        fast
    } else {
        slow
    };
    let dtn = json!({"peer": "dtn", "missing": "not installed", "mbps": null, "seconds": null,
                     "rcv_cpu_s": null, "snd_cpu_s": null});
    let rows = [
        row("d2tp", mbps, cpu),
        row("tcp", 10.0, 0.2),
        row("udt", 9.0, 1.0),
        dtn,
    ];
    json!({"network": "a link", "rows": rows})
}

#[test]
fn bulk_holds_if_as_fast_as_the_others_at_little_more_cost() {
    let judged = |fast, slow| judged("C1", RowVenue::Lab, |run| bulk(run, fast, slow)).unwrap();
    let good = judged((9.9, 0.3), (9.7, 0.4));
    assert!(good.holds);
    assert!(!judged((9.4, 0.3), (9.7, 0.4)).holds, "slower than TCP");
    assert!(!judged((9.9, 0.3), (9.7, 1.4)).holds, "6 % of a core more");
    assert!(!judged((9.9, 0.3), (8.0, 0.4)).holds, "not at that rate");
    // A program that is not installed is reported and not compared.
    assert_eq!(good.baseline["at_full_rate"]["dtn"], "not installed");
    assert_eq!(good.baseline["at_9_7_mbps"]["udt"]["rcv_core_share"], 0.05);
    assert_eq!(
        good.mark.last().map(String::as_str),
        Some("mbps_by_udts >= 0.95")
    );
    assert_eq!(good.conditions[0], "250 MB over a link");
}

#[test]
fn fairness_holds_if_we_are_as_even_as_tcp_and_neither_half_takes_more() {
    let judged = |d2tp: f64, mixed: f64, half: f64| {
        let row = |case: &str, jain: f64, tcp_share: f64| {
            let mut row = json!({"case": case, "jain": jain, "tcp_share": tcp_share, "mbps": 90,
                                 "jain_range": [jain, jain], "tcp_share_range": [tcp_share, tcp_share]});
            if case.ends_with("session") {
                row["jain_in_session"] = json!(0.99);
            }
            row
        };
        let rows = [
            row("tcp", 0.98, 1.0),
            row("d2tp", d2tp, 0.0),
            row("mixed", mixed, half),
            row("d2tp-one-session", 0.98, 0.0),
            row("mixed-one-session", 0.98, 0.98),
        ];
        let report = json!({"rows": rows, "network": "A link.", "conditions": "quiet"});
        judged("C2", RowVenue::Lab, |_| report.clone()).unwrap()
    };
    let good = judged(0.97, 0.965, 0.51);
    assert!(good.holds);
    assert_eq!(good.ours["d2tp"].get("tcp_share"), None);
    assert_eq!(good.ours["mixed_one_session"]["jain_in_session"], 0.99);
    assert_eq!(good.baseline["tcp"]["jain"], 0.98);
    assert!(!judged(0.955, 0.965, 0.51).holds, "TCP has 0.98");
    assert!(!judged(0.97, 0.94, 0.51).holds);
    assert!(!judged(0.97, 0.965, 0.54).holds);
    assert!(!judged(0.97, 0.965, 0.46).holds);
}

#[test]
fn churn_holds_if_goodput_stays_and_is_shared_at_the_papers_own_times() {
    let holds = |flows: u64, goodput_ratio: f64, jain: f64, minute_s: f64| {
        let report = |nodes: u64, jain: f64| {
            json!({
                "flows": flows, "nodes": nodes, "goodput_ratio": goodput_ratio, "jain": jain,
                "jain_mean": jain, "jain_without_churn": 1, "mbps_without_churn": 100, "mbps": 90,
                "minute_s": minute_s, "server_rss_bytes": 1, "calling_s": 1,
                "server_cpu_s_per_gb": 2, "server_cpu_s_per_gb_without_churn": 1,
            })
        };
        let judged = judged("C6", RowVenue::Lab, |run| {
            let nodes = run.named["nodes"].as_u64().unwrap();
            report(nodes, if nodes == 1 { 0.95 } else { jain })
        });
        let judged = judged.unwrap();
        assert_eq!(judged.ours["four"]["nodes"], 4);
        judged.holds
    };
    assert!(holds(65_536, 0.9, 0.91, 60.0));
    assert!(!holds(65_535, 0.95, 0.95, 60.0));
    assert!(!holds(65_536, 0.89, 0.95, 60.0));
    assert!(!holds(65_536, 0.95, 0.9, 60.0), "four are not fair");
    assert!(!holds(65_536, 0.95, 0.95, 20.0), "minutes are shorter");
}

#[test]
fn sleep_holds_if_it_is_small_and_everybody_asked_wakes_right() {
    let holds = |rss_bytes: u64, woken: u64, woken_ok: u64| {
        let report = json!({
            "flows": 1_000_000, "rss_bytes": rss_bytes, "woken": woken, "woken_ok": woken_ok,
        });
        judged("C9", RowVenue::Lab, |_| report.clone())
            .unwrap()
            .holds
    };
    assert!(holds(280_000_000, 1000, 1000));
    assert!(!holds(310_000_000, 1000, 1000));
    assert!(!holds(280_000_000, 1000, 999));
    assert!(!holds(280_000_000, 0, 0));
}

/// Test reports of the bench for kernel TCP and D2TP on a cellular link: Mb/s, round trip relative
/// to the shortest, ms of an object.
fn cellular(cubic: (f64, f64, f64), held: (f64, f64, f64)) -> Value {
    let row = |peer: &str, (mbps, rtt_by_min, object_ms): (f64, f64, f64)| {
        json!({"peer": peer, "mbps": mbps, "rtt_ms": 74.0 * rtt_by_min, "rtt_by_min": rtt_by_min,
               "object_ms": object_ms})
    };
    let rows = [
        row("tcp", cubic),
        row("tcp-drwa", held),
        row("tcp-bbr", held),
        row("d2tp", cubic),
        row("d2tp-drwa", held),
    ];
    json!({"rtt_min_ms": 74, "rows": rows})
}

#[test]
fn drwa_holds_if_the_queue_is_short_the_rate_the_same_and_the_page_sooner() {
    let judged = |cubic, held| judged("D1", RowVenue::Lab, |_| cellular(cubic, held)).unwrap();
    let cubic = (3.8, 8.0, 1_000.0);
    let good = judged(cubic, (3.7, 3.1, 600.0));
    assert!(good.holds);
    assert_eq!(good.ours["lte"]["tcp"]["bulk"]["mbps"], 3.7);
    let others = good.baseline["hspa"]["with_objects"].as_array().unwrap();
    assert_eq!(others.len(), 3);
    assert!(!judged(cubic, (3.7, 3.3, 600.0)).holds, "too long a queue");
    assert!(
        !judged(cubic, (3.6, 3.1, 600.0)).holds,
        "5 % of the rate lost"
    );
    assert!(!judged(cubic, (3.7, 3.1, 620.0)).holds, "38 % faster");
    assert!(
        !judged((3.8, 5.0, 1_000.0), (3.7, 3.1, 600.0)).holds,
        "was not bloated"
    );
}

#[test]
fn far_away_it_holds_if_more_than_the_fixed_window_and_no_less_than_a_free_one() {
    let holds = |rows: [[f64; 3]; 2]| {
        let report = |run: &PlannedRun<'_>| {
            let of = ["fixed", "free", "held"]
                .iter()
                .position(|name| *name == run.variant.name);
            // The longest round trip of each network is the second of the two kinds.
            let far = [677.0, 533.0, 798.0, 754.0].contains(&run.named["rtt_ms"].as_f64().unwrap());
            download(
                rows[usize::from(far)][of.unwrap()] * 120e6 / 8.0,
                1.0,
                json!({}),
            )
        };
        judged("D2", RowVenue::Sim, report).unwrap()
    };
    let good = holds([[2.0, 3.0, 2.97], [1.0, 3.0, 3.0]]);
    assert!(good.holds);
    assert_eq!(
        good.ours["hspa"]["rtt_ms"],
        json!([265, 347, 451, 570, 677])
    );
    assert_eq!(good.ours["hspa"]["gain_at_longest"], 2.0);
    assert_eq!(good.baseline["evdo_sprint"]["fixed_window"], 65_535);
    assert!(
        !holds([[2.0, 3.0, 2.9], [1.0, 3.0, 2.95]]).holds,
        "less than free"
    );
    assert!(!holds([[2.0, 3.0, 3.0], [3.0, 3.0, 3.0]]).holds, "no gain");
}

#[test]
fn the_example_of_the_document_is_a_row() {
    let document = include_str!("../../../../../docs/repro.md");
    let text = document
        .split("```toml")
        .nth(1)
        .unwrap()
        .split("```")
        .next()
        .unwrap();
    let row = ResultRow::parse("docs/repro.md", text).unwrap();
    let judged = judged_row(&row, RowVenue::Sim, |run| {
        let mbps = run.named["sum_mbps"].as_f64().unwrap();
        download(mbps * 1e6 / 8.0, 1.0, json!({"wlan0": 1}))
    });
    let judged = judged.unwrap();
    assert!(judged.holds);
    assert_eq!(judged.ours["cases"][2]["second_mbps"], 1);
    assert!((judged.ours["cases"][0]["gain"].as_f64().unwrap() - 1.0).abs() < 1e-9);
    assert_eq!(judged.conditions, ["one download of 50 MB, RTT 20 ms"]);
}

#[test]
fn the_example_of_the_document_runs_in_the_simulator() {
    let document = include_str!("../../../../../docs/repro.md");
    let text = document
        .split("```toml")
        .nth(1)
        .unwrap()
        .split("```")
        .next()
        .unwrap();
    let text = text.replace("megabytes = 50", "megabytes = 2");
    let row = ResultRow::parse("docs/repro.md", &text).unwrap();
    let run = reproduced::run(&row, RowVenue::Sim, &SourceFiles::default()).unwrap();
    let cases = run.ours["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 3);
    // Two equal links carry most of twice as much as one, however short the download.
    assert!(cases[0]["gain"].as_f64() > Some(0.5), "{}", run.ours);
    assert!(run.ours["share_min"].as_f64() > Some(0.6), "{}", run.ours);
    let again = reproduced::run(&row, RowVenue::Sim, &SourceFiles::default()).unwrap();
    assert_eq!(run.ours, again.ours);
}

#[test]
fn what_is_misspelt_is_named_with_what_was_probably_meant() {
    let fault = |text: &str| {
        let text = format!("id = 'X'\nclaim = ''\npaper = ''\n{text}");
        format!("{:#}", ResultRow::parse("X.toml", &text).unwrap_err())
    };
    let whole =
        "scenario.duration_s = 1\nours.a = '1'\nmarks = ['a > 0']\n[[sim.variant]]\nname = 'a'\n";
    let told = fault(&format!("[sim]\nmraks = []\n{whole}"));
    assert!(
        told.contains("X.toml: [sim]") && told.contains("did you mean `marks`?"),
        "{told}"
    );
    let told = fault(&format!("[sim]\nrequire = ['flows[0]. == 1']\n{whole}"));
    assert!(told.contains("a name after `.`"), "{told}");
    let told = fault(&format!("[sim]\n{whole}over = 'mptcp'"));
    assert!(told.contains("variant a: `over` is of [lab]"), "{told}");
    let told = fault(&format!("[sim]\nrunner = 'subway'\n{whole}"));
    assert!(told.contains("either"), "{told}");
    let told = fault(&format!(
        "[sim]\n{whole}[[sim.axis]]\nb = [1]\nc = [1, 2]\n"
    ));
    assert!(told.contains("lists of the same length"), "{told}");
    assert!(fault("marks = ['a > 0']").contains("neither [sim] nor [lab]"));
}

#[test]
fn an_unknown_name_in_an_expression_is_named_too() {
    let text = "id = 'X'\nclaim = ''\npaper = ''\n[sim]\nmarks = ['a > 0']\nscenario.duration_s = 1\n\
                values.seconds = 3\nours.a = 'd2tp.flows[0].bytes / secnds'\n[[sim.variant]]\nname = 'd2tp'\n";
    let row = ResultRow::parse("X.toml", text).unwrap();
    let told = judged_row(&row, RowVenue::Sim, |_| download(1.0, 1.0, json!({})));
    let told = format!("{:#}", told.unwrap_err());
    assert!(told.contains("did you mean `seconds`?"), "{told}");
}
