//! Tests of a video in two layers with an outage every 20 s and 1 % loss, with several uses of the
//! links.

use cedos_lab_scenario::Scenario;
use cedos_lab_sim::video::{VideoLinkUse, VideoQuality, watch};

/// Wi-Fi that is lost for 2 s every 20 s, and a slow link that is always up.
const LINKS: &str = r#"
duration_s = 60
[[link]]
name = "wlan0"
medium = "802.11g"
rtt_ms = 50
loss = 0.01
[[link.repeat]]
every_s = 20
first_s = 7
for_s = 2
dead = true
[[link]]
name = "wwan0"
down_mbps = 0.6
up_mbps = 0.15
rtt_ms = 150
"#;

fn seen(manner: VideoLinkUse) -> VideoQuality {
    let scenario = Scenario::parse("video", LINKS, &mut |_| unreachable!()).unwrap();
    let watched = watch(&scenario, manner);
    println!("{manner:?}\n{watched:?}");
    watched
}

fn share(part: u64, all: u64) -> f64 {
    part as f64 / all as f64
}

#[test]
fn base_layers_reports_and_commands_come_in_time_by_their_routes_and_not_without() {
    let three = seen(VideoLinkUse::THREE);
    let plain = seen(VideoLinkUse::plain(2));
    let alone = seen(VideoLinkUse::plain(1));
    let base = |w: &VideoQuality| share(w.base, w.pictures);
    assert!(base(&three) > 0.99, "{}", base(&three));
    assert!(base(&plain) < 0.985 && base(&alone) < 0.92);
    let reports = |w: &VideoQuality| share(w.reports_in_time, w.reports);
    assert!(reports(&three) > 0.99, "{}", reports(&three));
    assert!(reports(&alone) < 0.92);
    let slowest = |w: &VideoQuality| *w.commands.iter().max().unwrap();
    assert!(slowest(&three) < slowest(&plain) && slowest(&plain) < slowest(&alone));
    // Mirrored data takes no capacity from the rest.
    assert!(three.extra_bytes * 10 > plain.extra_bytes * 9);
}

#[test]
fn the_same_seed_shows_the_same() {
    assert_eq!(seen(VideoLinkUse::THREE), seen(VideoLinkUse::THREE));
}
