//! Mobile data that measures a metered link: none beside a Wi-Fi that is good enough, and where the deadline is in
//! doubt, said before it is spent and counted afterwards. Judged by what the kernel counted.

use std::path::Path;

use cedos_lab_rig::namespace::{
    cell_on, in_namespace, origin_namespace, received, sent, sh, wifi_on,
};
use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, object, proper};
use cedos_lab_rig::program::{CedosRun, ProxyProcess, cedos, run};
use cedos_lab_rig::share::beside_others;
use cedos_lab_rig::this_test;
use cedos_lab_rig::wait::within;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};

/// More than what is worth a measurement of a link that was never used.
const OBJECT_BYTES: usize = 8_000_000; // 3.2 s at 20 Mb/s, 32 s at 2 Mb/s

/// The most payload of one measurement.
const PROBE_BYTES: u64 = 100_000;

/// What a metered link may carry beside a Wi-Fi that is good enough, in both directions: what the kernel itself asks of a
/// link that has come up. A path would take more for its first packets alone.
const BESIDE_WIFI_BYTES_MAX: u64 = 2_000; // 1,032 were seen: router solicitations and the like

/// What a session and its acknowledgements take on a metered link in the time of this test.
const BESIDE_PROBES_BYTES_MAX: u64 = 40_000; // 11,000 were seen in each direction for two probes

/// An origin and a proxy, which both links lead to.
struct Net {
    origin: ScriptedOrigin,
    proxy: ProxyProcess,
    /// The network namespace of the far ends of the links.
    namespace: String,
}

impl Net {
    /// `home` is the directory of the device. Must be called in the device's namespace.
    fn new(home: &Path) -> Net {
        let place = home.to_owned();
        origin_namespace(|| async move {
            let bytes = object(OBJECT_BYTES, 1);
            let origin = ScriptedOrigin::start_at("192.0.2.1", move |asked| {
                OriginReply(proper(asked, &bytes, "\"v1\""), ReplyEnd::Close)
            });
            let (process, thread) = (std::process::id(), nix::unistd::gettid());
            Net {
                origin: origin.await,
                proxy: ProxyProcess::start(&place, "192.0.2.1:0", &[]).await,
                namespace: format!("/proc/{process}/task/{thread}/ns/net"),
            }
        })
    }

    /// Sets the rate of the Wi-Fi towards the device.
    fn set_wifi_rate(&self, rate: &str) {
        let namespace = &self.namespace;
        sh(&format!(
            "nsenter --net={namespace} tc qdisc change dev ap0 root tbf rate {rate} burst 20k latency 100ms"
        ));
    }

    /// The command line of a download, without the first word.
    fn get<'a>(&'a self, url: &'a str, file: &'a str, within: &'a str) -> [&'a str; 8] {
        let prox = &*self.proxy.address;
        ["get", url, "-o", file, "--prox", prox, "--within", within]
    }
}

fn metered() -> u64 {
    received("wwan0") + sent("wwan0")
}

/// The plan of a download in JSON, and in words.
async fn planned(home: &Path, get: &[&str]) -> (Value, String) {
    let plan = run(home, &[get, &["--dry-run", "--json"]].concat()).await;
    assert_eq!(plan.code, 0, "{}", plan.errors);
    let words = run(home, &[get, &["--dry-run"]].concat()).await;
    let words = String::from_utf8(words.output).expect("text");
    (plan.last().clone(), words)
}

#[test]
fn a_download_that_wifi_carries_in_time_spends_no_mobile_data_and_its_plan_says_so() {
    let _share = beside_others();
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let home = home.path();
        let net = Net::new(home);
        wifi_on("198.51.100.7");
        cell_on();
        let url = net.origin.url("/a");
        // The second download of each begins with what the first one measured.
        for (file, within) in [("a", "6h"), ("b", "6h"), ("c", "30h"), ("d", "30h")] {
            let before = metered();
            let get = net.get(&url, file, within);
            let (plan, words) = planned(home, &get).await;
            for told in [&plan["promise"], &plan["forecast"]] {
                assert_eq!(told["metered_bytes_expected"], 0, "{plan}");
            }
            assert_eq!(plan["probe"], Value::Null, "{plan}");
            assert!(!words.contains("Measures"), "{words}");
            assert!(words.contains("metered data: 0 B expected"), "{words}");

            let CedosRun {
                code,
                events,
                errors,
                ..
            } = run(home, &[&get[..], &["--json"]].concat()).await;
            assert_eq!(code, 0, "{errors}");
            assert!(
                events.iter().all(|event| event["event"] != "note"),
                "{events:?}"
            );
            let done = events.last().expect("an event");
            assert_eq!(done["metered_bytes"], 0, "{done}");
            let carried = metered() - before;
            eprintln!("{within}: {carried} bytes on the metered link");
            assert!(carried <= BESIDE_WIFI_BYTES_MAX, "{within}: {carried}");
        }
    });
}

#[test]
fn a_measurement_of_a_metered_link_is_planned_said_before_it_and_counted() {
    let _share = beside_others();
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let home = home.path();
        let net = Net::new(home);
        wifi_on("198.51.100.7");
        cell_on();
        net.set_wifi_rate("2mbit");
        let url = net.origin.url("/a");
        let before = received("wwan0");
        // A quarter more than the time that the Wi-Fi needs: in doubt, and not yet worth paying for.
        let get = net.get(&url, "a", "40s");
        let (plan, words) = planned(home, &get).await;
        assert_eq!(plan["probe"]["link"], "wwan0", "{plan}");
        assert_eq!(plan["probe"]["bytes"], PROBE_BYTES, "{plan}");
        let line = "Measures  wwan0 with up to 100.00 kB of mobile data, if free networks turn out too slow";
        assert!(words.contains(line), "{words}");

        let mut child = cedos(home, &[&get[..], &["--json"]].concat())
            .spawn()
            .expect("start cedos");
        let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        let (mut notes, mut done) = (Vec::new(), Value::Null);
        while let Some(line) = within(lines.next_line()).await.expect("text") {
            let event: Value = serde_json::from_str(&line).expect("JSON");
            let metered = event["metered_bytes"].as_u64().unwrap_or_default();
            if let Some(text) = event["text"].as_str().filter(|_| event["event"] == "note") {
                notes.push(text.to_owned());
            }
            assert!(
                metered <= PROBE_BYTES * notes.len() as u64,
                "spent {metered} bytes, having said {notes:?}"
            );
            if metered > 0 {
                // The rest comes soon, so that nothing but measurements is paid.
                net.set_wifi_rate("20mbit");
            }
            done = event;
        }
        within(child.wait()).await.expect("it ends");
        let said = "measuring wwan0 with up to 100 kB of mobile data: free networks alone may miss the deadline";
        assert_eq!(notes.first().map(String::as_str), Some(said), "{notes:?}");
        assert_eq!(done["event"], "done", "{done}");
        let counted = done["metered_bytes"].as_u64().expect("a number");
        assert!(counted > 0, "{done}");
        assert_eq!(done["bytes_by_link"]["wwan0"], counted, "{done}");
        let carried = received("wwan0") - before;
        eprintln!("{counted} bytes counted, {carried} on the metered link; {notes:?}");
        assert!(
            (counted..=counted + BESIDE_PROBES_BYTES_MAX).contains(&carried),
            "{counted} bytes counted, {carried} on the metered link"
        );
    });
}
