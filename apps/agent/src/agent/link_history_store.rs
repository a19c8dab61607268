//! Stores what was learnt about links: forecasts by place and hour, the up and down times of each
//! radio, the rate of each network.
//!
//! ```text
//!  $XDG_STATE_HOME/cedos/learnt   sha256 of the rest, in hex ⏎ JSON
//! ```
//!
//! The file is written completely, synced and renamed: a crash leaves the old or the new one. A
//! damaged file is renamed, and learning starts again.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use d2tp_sched::{DeviceLocation, KnownLink, LinkForecast, NetworkRates, SavedHistory, UpPeriod};
use d2tp_serial::SerialLine;
use d2tp_time::{Span, Time};
use jiff::civil::Date;
use jiff::{Timestamp, Zoned};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::fetch::boot_clock::BootInstant;
use crate::fetch::jobs;
use d2tp_driver::SchedulerHandle;
use d2tp_sched::SavedLinkHistory;

const VERSION: u32 = 1;

/// The name of the file in the directory of the state.
const FILE_NAME: &str = "learnt";

/// The most radios with a forecast of their own.
const SLOTS_MAX: usize = 16;

/// The interval between updates from which the device counts as having been asleep, so that the links'
/// history has a gap.
const AWAKE: Duration = Duration::from_secs(60);

/// The interval at which the history is saved.
const KEEP_EVERY: Duration = Duration::from_secs(60); // a guess: what an SD card bears

/// The largest file that is read.
const FILE_BYTES_MAX: u64 = 8 << 20;

/// The round trip of a radio that was not measured, beside what its line takes for two packets of this size.
const ROUND_TRIP_FIRST: Duration = Duration::from_millis(500); // the radio of E1
const LARGE_PACKET_BYTES: usize = 1_200;

/// The location of a device that is on no known network.
const NOWHERE: &str = "";

/// The saved history of links and networks.
pub struct LinkHistoryStore {
    forecasts: BTreeMap<String, LinkForecast>,
    /// The network that the device was on last.
    place: String,
    /// Where the device is, in metres east and north, if that is known: then this is the place.
    point: Option<(f64, f64)>,
    seen_at: Option<BootInstant>,
    kept_at: BootInstant,
    file: Option<PathBuf>,
}

#[derive(Serialize, Deserialize)]
struct LinkHistoryFile {
    version: u32,
    /// When the file was written, in seconds since 1970.
    at: i64,
    place: String,
    /// Encoded forecasts (`Forecast::encode`) by radio.
    forecasts: BTreeMap<String, String>,
    /// History towards this device, and from it.
    lanes: [DirectionRecord; 2],
}

#[derive(Default, Serialize, Deserialize)]
struct DirectionRecord {
    radios: BTreeMap<String, RadioRecord>,
    /// Bytes per second of each network, and over how many seconds that is the mean.
    networks: BTreeMap<String, (f64, f64)>,
}

#[derive(Serialize, Deserialize)]
struct RadioRecord {
    /// Lengths of up periods in seconds, and their bytes per second.
    ons: Vec<(f64, f64)>,
    offs: Vec<f64>,
    away_s: Option<f64>,
}

impl LinkHistoryStore {
    /// Loads the saved history, with the part for the scheduler; nothing if none was saved or it is
    /// damaged.
    pub fn load() -> (LinkHistoryStore, Option<[SavedLinkHistory; 2]>) {
        let file = jobs::state_directory()
            .ok()
            .map(|state| state.join(FILE_NAME));
        let mut store = LinkHistoryStore {
            forecasts: BTreeMap::new(),
            place: NOWHERE.to_owned(),
            point: None,
            seen_at: None,
            kept_at: BootInstant::now(),
            file: file.clone(),
        };
        let Some(path) = file else {
            return (store, None);
        };
        match read(&path, Timestamp::now().as_second()) {
            Ok(None) => (store, None),
            Ok(Some((forecasts, place, lanes))) => {
                (store.forecasts, store.place) = (forecasts, place);
                (store, Some(lanes))
            }
            Err(error) => {
                let aside = path.with_extension("damaged");
                tracing::warn!(%error, aside = %aside.display(), "link history is damaged and \
                    starts empty");
                if let Err(error) = std::fs::rename(&path, &aside) {
                    tracing::warn!(%error, "and cannot be renamed");
                }
                (store, None)
            }
        }
    }

    /// Sets where the device is, in metres east and north; none if that is not known.
    pub fn set_point(&mut self, point: Option<(f64, f64)>) {
        self.point = point;
    }

    /// Learns from the current links, and updates the scheduler's forecasts. `place`: the network the
    /// device is on, if any.
    pub fn observe(&mut self, scheduler: &SchedulerHandle, place: Option<&str>) {
        let (now, wall) = (BootInstant::now(), Zoned::now());
        self.see_at(now, &wall, scheduler, place);
    }

    fn see_at(
        &mut self,
        now: BootInstant,
        wall: &Zoned,
        scheduler: &SchedulerHandle,
        place: Option<&str>,
    ) {
        if let Some(place) = place {
            place.clone_into(&mut self.place);
        }
        let spot = match self.point {
            Some((east, north)) => DeviceLocation::at(east, north),
            None => DeviceLocation::named(&self.place),
        };
        let at = Time::ZERO + Span::from(now.since_boot());
        let (day, second) = day_and_second(wall);
        let passed = self.seen_at.map(|before| now.since(before));
        let passed = passed.filter(|passed| *passed <= AWAKE);
        let passed_s = passed.map_or(0, |passed| passed.as_secs().max(1) as u32);
        self.seen_at = Some(now);
        let radios = scheduler.known_links();
        for radio in &radios {
            if self.forecasts.len() < SLOTS_MAX {
                self.forecasts.entry(radio.slot.clone()).or_default();
            }
        }
        for (slot, forecast) in &mut self.forecasts {
            let radio = radios.iter().find(|radio| radio.slot == *slot);
            let carries = radio.is_some_and(|radio| radio.carries);
            forecast.observe(at, &spot, carries);
            // One that is up and was never used says nothing of its rate.
            let rate = match radio {
                Some(radio) if radio.carries => radio.rate,
                _ => Some(0.0),
            };
            if let Some(rate) = rate.filter(|_| passed_s > 0) {
                let from = second.saturating_sub(passed_s);
                forecast
                    .daily_rates()
                    .note(day, from..second.max(from + 1), rate);
            }
            scheduler.set_hint(slot, &forecast.hint(at, day, second));
        }
        scheduler.set_sleeping(self.not_worth_waking(at, &spot, scheduler, &radios));
    }

    /// The serial lines whose radios are not worth waking for an outage here: another link is back before the first byte could
    /// arrive, for which a path has to be opened and something to be asked.
    fn not_worth_waking(
        &self,
        at: Time,
        spot: &DeviceLocation,
        scheduler: &SchedulerHandle,
        radios: &[KnownLink],
    ) -> BTreeSet<String> {
        let is_short = |round_trip: Duration| {
            let others = self.forecasts.iter();
            let mut others = others.filter(|(slot, _)| !SerialLine::is_line_name(slot));
            let first_byte = Span::from(2 * round_trip);
            others.any(|(_, forecast)| !forecast.is_worth_bridging_here(at, spot, first_byte))
        };
        let sleeps = |radio: &&KnownLink| {
            let line: Option<SerialLine> = radio.device.parse().ok();
            line.filter(|line| line.sleeps).is_some_and(|line| {
                let measured = scheduler.round_trip(&radio.device);
                let assumed = ROUND_TRIP_FIRST + 2 * line.time_of(LARGE_PACKET_BYTES);
                is_short(measured.unwrap_or(assumed))
            })
        };
        let asleep = radios.iter().filter(sleeps);
        asleep.map(|radio| radio.device.clone()).collect()
    }

    /// Saves the history, if it is time or `must` is set.
    pub fn save(&mut self, scheduler: &SchedulerHandle, must: bool) {
        let now = BootInstant::now();
        if !must && now.since(self.kept_at) < KEEP_EVERY {
            return;
        }
        self.kept_at = now;
        let Some(path) = &self.file else {
            return;
        };
        if let Err(error) = self.write(path, scheduler, Timestamp::now().as_second()) {
            tracing::warn!(%error, "cannot save the link history");
        }
    }

    fn write(&self, path: &Path, scheduler: &SchedulerHandle, at: i64) -> io::Result<()> {
        let encode = |(slot, forecast): (&String, &LinkForecast)| {
            (slot.clone(), BASE64.encode(forecast.encode()))
        };
        let file = LinkHistoryFile {
            version: VERSION,
            at,
            place: self.place.clone(),
            forecasts: self.forecasts.iter().map(encode).collect(),
            lanes: scheduler.saved().map(DirectionRecord::of),
        };
        let body = serde_json::to_vec(&file)?;
        let folder = path.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder)?;
        let fresh = path.with_extension("new");
        let mut out = std::fs::OpenOptions::new()
            .create(true)
            .write(true)
            .truncate(true)
            .mode(0o600)
            .open(&fresh)?;
        writeln!(out, "{}", hex::encode(Sha256::digest(&body)))?;
        out.write_all(&body)?;
        out.sync_all()?;
        std::fs::rename(&fresh, path)?;
        std::fs::File::open(folder)?.sync_all()
    }
}

/// The forecasts that were saved, by radio; none if nothing was.
///
/// # Errors
/// The file cannot be read, or is damaged.
pub(super) fn kept_forecasts() -> anyhow::Result<BTreeMap<String, LinkForecast>> {
    let file = jobs::state_directory()?.join(FILE_NAME);
    let shown = file.display();
    let kept = read(&file, Timestamp::now().as_second());
    let kept = kept.with_context(|| format!("cannot read {shown}"))?;
    Ok(kept.map_or_else(BTreeMap::new, |(forecasts, ..)| forecasts))
}

type LoadedLinkHistory = (
    BTreeMap<String, LinkForecast>,
    String,
    [SavedLinkHistory; 2],
);

fn read(path: &Path, now: i64) -> anyhow::Result<Option<LoadedLinkHistory>> {
    let text = match std::fs::metadata(path) {
        Ok(about) if about.len() > FILE_BYTES_MAX => bail!("{} bytes are too many", about.len()),
        Ok(_) => std::fs::read(path)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let end = text
        .iter()
        .position(|byte| *byte == b'\n')
        .context("there is no digest")?;
    let (digest, body) = (&text[..end], &text[end + 1..]);
    if digest != hex::encode(Sha256::digest(body)).as_bytes() {
        bail!("its digest does not match");
    }
    let file: LinkHistoryFile = serde_json::from_slice(body)?;
    if file.version != VERSION {
        bail!("it is of version {}", file.version);
    }
    let mut forecasts = BTreeMap::new();
    for (slot, text) in file.forecasts.into_iter().take(SLOTS_MAX) {
        forecasts.insert(slot, LinkForecast::decode(&BASE64.decode(text)?)?);
    }
    let passed_s = now.saturating_sub(file.at).max(0) as f64;
    let lanes = file.lanes.map(|lane| lane.back(passed_s));
    Ok(Some((forecasts, file.place, lanes)))
}

impl DirectionRecord {
    fn of((radios, networks): SavedLinkHistory) -> DirectionRecord {
        let radio = |past: SavedHistory| RadioRecord {
            ons: past
                .ons
                .iter()
                .map(|spell| (spell.length_s, spell.rate))
                .collect(),
            offs: past.offs,
            away_s: past.away_s,
        };
        let network = |rates: NetworkRates| (rates.whole, rates.known_s);
        DirectionRecord {
            radios: radios
                .into_iter()
                .map(|(slot, past)| (slot, radio(past)))
                .collect(),
            networks: networks
                .into_iter()
                .map(|(name, rates)| (name, network(rates)))
                .collect(),
        }
    }

    /// The history after this many seconds without observation: links count as down during that
    /// time.
    fn back(self, passed_s: f64) -> SavedLinkHistory {
        let spell = |(length_s, rate)| UpPeriod { length_s, rate };
        let past = |radio: RadioRecord| SavedHistory {
            ons: radio.ons.into_iter().map(spell).collect(),
            offs: radio.offs,
            away_s: Some(radio.away_s.unwrap_or(0.0) + passed_s),
        };
        let rates = |(whole, known_s)| NetworkRates { whole, known_s };
        (
            self.radios
                .into_iter()
                .map(|(slot, radio)| (slot, past(radio)))
                .collect(),
            self.networks
                .into_iter()
                .map(|(name, pair)| (name, rates(pair)))
                .collect(),
        )
    }
}

/// The local day, counted from 1970, and the second of that day.
fn day_and_second(wall: &Zoned) -> (u32, u32) {
    let first = Date::constant(1970, 1, 1);
    let day = wall.date().duration_since(first).as_secs() / 86_400;
    let time = wall.time();
    let hour = i32::from(time.hour());
    let second = (hour * 60 + i32::from(time.minute())) * 60 + i32::from(time.second());
    (day.max(0) as u32, second as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use d2tp_sched::{ClientReport, LinkSurroundings, SchedulerKind, TransferDirection};
    use d2tp_sched::{CostPolicy, DeadlineFallback, FlowDemand, LinkCandidate, LinkClass};
    use std::sync::Arc;

    fn empty(file: &Path) -> LinkHistoryStore {
        LinkHistoryStore {
            forecasts: BTreeMap::new(),
            place: NOWHERE.to_owned(),
            point: None,
            seen_at: None,
            kept_at: BootInstant::now(),
            file: Some(file.to_owned()),
        }
    }

    /// The surroundings of a device on the Wi-Fi of this name, or without Wi-Fi.
    fn around(ssid: Option<&str>) -> LinkSurroundings {
        let radio = |_: &str| KnownLink {
            device: "wlan0".into(),
            slot: "Wi-Fi".into(),
            class: LinkClass::Free,
            carries: true,
            rate: None,
        };
        LinkSurroundings {
            links: ssid.map(radio).into_iter().collect(),
            networks: ssid
                .map(|ssid| ("wlan0".to_owned(), format!("wifi:{ssid}")))
                .into_iter()
                .collect(),
            slots: [("wlan0".to_owned(), "Wi-Fi".to_owned())].into(),
            ..LinkSurroundings::default()
        }
    }

    fn at(second: u64) -> (BootInstant, Zoned) {
        let wall: Zoned = "2030-03-04T08:00:00+00:00[UTC]".parse().unwrap();
        let wall = wall
            .checked_add(jiff::SignedDuration::from_secs(second as i64))
            .unwrap();
        (
            BootInstant::from_boot(Duration::from_secs(50_000 + second)),
            wall,
        )
    }

    /// Five mornings: a hole of 40 s behind home, one of 200 s behind the office.
    fn mornings(store: &mut LinkHistoryStore, scheduler: &Arc<SchedulerHandle>) {
        for day in 0..5 {
            let begun = day * 86_400;
            for (from, until, ssid) in [
                (0, 60, Some("home")),
                (60, 100, None),
                (100, 160, Some("office")),
                (160, 360, None),
                (360, 400, Some("home")),
            ] {
                scheduler.observe(&around(ssid));
                for second in (from..until).step_by(5) {
                    let (now, wall) = at(begun + second);
                    store.see_at(now, &wall, scheduler, ssid);
                }
            }
        }
    }

    fn hole_after(store: &mut LinkHistoryStore, ssid: &str) -> f64 {
        let scheduler = SchedulerHandle::new(SchedulerKind::D2Sched);
        let begun = 6 * 86_400;
        for (second, on) in [(0, Some(ssid)), (5, None)] {
            scheduler.observe(&around(on));
            let (now, wall) = at(begun + second);
            store.see_at(now, &wall, &scheduler, on);
        }
        let now = Time::ZERO + Span::from(at(begun + 5).0.since_boot());
        let hole = store.forecasts["Wi-Fi"]
            .ongoing_outage(now)
            .expect("it was lost here before");
        hole.quantile(0.5).expect("a median")
    }

    /// Whether a radio of which so long a round trip was measured sleeps on where the link to this network is lost.
    fn sleeps_behind(store: &mut LinkHistoryStore, ssid: &str, round_trip: Duration) -> [bool; 2] {
        const RADIO: &str = "serial:/dev/ttyUSB0@115200,sleep";
        let scheduler = SchedulerHandle::new(SchedulerKind::D2Sched);
        scheduler.record_round_trip(RADIO, round_trip);
        let begun = 6 * 86_400;
        [(0, Some(ssid)), (5, None)].map(|(second, on)| {
            let mut around = around(on);
            around.links.push(KnownLink {
                device: RADIO.into(),
                slot: RADIO.into(),
                class: LinkClass::Free,
                carries: true,
                rate: None,
            });
            scheduler.observe(&around);
            let (now, wall) = at(begun + second);
            store.see_at(now, &wall, &scheduler, on);
            let at = Time::ZERO + Span::from(now.since_boot());
            let spot = DeviceLocation::named(&store.place);
            let radios = scheduler.known_links();
            let asleep = store.not_worth_waking(at, &spot, &scheduler, &radios);
            asleep.contains(RADIO)
        })
    }

    #[test]
    fn a_radio_sleeps_through_holes_that_end_before_it_could_answer_and_only_there() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("learnt");
        let scheduler = SchedulerHandle::new(SchedulerKind::D2Sched);
        // A hole of 40 s behind home, one of 200 s behind the office; known before they begin.
        for (ssid, seconds, sleeps) in [
            ("home", 5, false),
            ("home", 30, true),
            ("office", 30, false),
            ("office", 150, true),
            ("elsewhere", 150, false),
        ] {
            let mut store = empty(&file);
            mornings(&mut store, &scheduler);
            let round_trip = Duration::from_secs(seconds);
            let slept = sleeps_behind(&mut store, ssid, round_trip);
            assert_eq!(slept, [sleeps; 2], "{ssid} {seconds}");
        }
    }

    #[test]
    fn holes_are_learnt_by_the_network_they_begin_at_and_survive_the_process() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("state").join("learnt");
        let scheduler = SchedulerHandle::new(SchedulerKind::D2Sched);
        let mut store = empty(&file);
        mornings(&mut store, &scheduler);
        store.write(&file, &scheduler, 1_000).unwrap();
        let (forecasts, place, _) = read(&file, 1_000).unwrap().expect("it is there");
        assert_eq!(place, "home");
        let mut again = LinkHistoryStore {
            forecasts,
            ..empty(&file)
        };
        for (ssid, seconds) in [("home", 40.0), ("office", 200.0)] {
            let told = hole_after(&mut again, ssid);
            assert!((told - seconds).abs() <= 5.0, "{ssid}: {told}");
        }
    }

    #[test]
    fn a_network_has_its_rate_again_after_a_restart_and_on_another_device() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("learnt");
        let scheduler = SchedulerHandle::new(SchedulerKind::D2Sched);
        scheduler.observe(&around(Some("home")));
        let client = scheduler.join(TransferDirection::Down, 1);
        let way = LinkCandidate {
            name: "wlan0".into(),
            class: LinkClass::Free,
            rate_bytes_per_s: None,
            metric: 0,
            stalled: false,
            in_use: true,
        };
        let mut carried = BTreeMap::from([("wlan0".to_owned(), 0)]);
        let begun = BootInstant::now();
        // The rate is over real time: two looks at least.
        let mut seen = None;
        while seen.is_none() {
            // sleep: a rate is over real time, of which two looks are needed
            std::thread::sleep(Duration::from_millis(300));
            *carried.get_mut("wlan0").unwrap() += 1_000_000;
            client.decide(&ClientReport {
                demand: FlowDemand {
                    remaining_bytes: Some(1 << 30),
                    left: None,
                    policy: CostPolicy::FreeFirst,
                    if_late: DeadlineFallback::Cell,
                    metered_bytes_left: None,
                },
                size_bytes: None,
                priority: 0,
                start: None,
                candidates: std::slice::from_ref(&way),
                carried: &carried,
                uses_several_links: true,
                always_pays: false,
                is_interactive: false,
                keeps_awake: true,
                source: d2tp_sched::SourceSupply::Ample,
            });
            seen = scheduler.link_rate("wlan0");
            assert!(
                BootInstant::now().since(begun) < Duration::from_secs(60),
                "no rate"
            );
        }
        let rate = seen.unwrap().0;
        empty(&file).write(&file, &scheduler, 1_000).unwrap();
        let (_, _, lanes) = read(&file, 1_030).unwrap().expect("it is there");
        assert!(lanes[0].0["Wi-Fi"].away_s >= Some(30.0));
        let again = SchedulerHandle::new(SchedulerKind::D2Sched);
        again.restore(lanes);
        let mut renamed = around(Some("home"));
        renamed.links[0].device = "wlp3s0".into();
        renamed.networks = [("wlp3s0".to_owned(), "wifi:home".to_owned())].into();
        renamed.slots = [("wlp3s0".to_owned(), "Wi-Fi".to_owned())].into();
        again.observe(&renamed);
        let (known, carries) = again.link_rate("wlp3s0").expect("its rate is known");
        assert!((known - rate).abs() < 1.0 && carries, "{known} {rate}");
        // Another network is not as fast because this one was.
        renamed.networks = [("wlp3s0".to_owned(), "wifi:cafe".to_owned())].into();
        again.observe(&renamed);
        assert_eq!(again.link_rate("wlp3s0"), None);
        renamed.networks = [("wlp3s0".to_owned(), "wifi:home".to_owned())].into();
        again.observe(&renamed);
        assert!(
            again
                .link_rate("wlp3s0")
                .is_some_and(|(known, _)| (known - rate).abs() < 1.0)
        );
    }

    #[test]
    fn whatever_bit_is_flipped_and_wherever_it_is_cut_it_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("learnt");
        let scheduler = SchedulerHandle::new(SchedulerKind::D2Sched);
        let mut store = empty(&file);
        let (now, wall) = at(0);
        scheduler.observe(&around(Some("home")));
        store.see_at(now, &wall, &scheduler, Some("home"));
        store.write(&file, &scheduler, 1_000).unwrap();
        let whole = std::fs::read(&file).unwrap();
        assert!(read(&file, 1_000).unwrap().is_some());
        for cut in 0..whole.len() {
            std::fs::write(&file, &whole[..cut]).unwrap();
            assert!(read(&file, 1_000).is_err(), "cut at {cut}");
        }
        for bit in 0..8 * whole.len() {
            let mut flipped = whole.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            std::fs::write(&file, &flipped).unwrap();
            assert!(read(&file, 1_000).is_err(), "bit {bit}");
        }
        std::fs::remove_file(&file).unwrap();
        assert!(read(&file, 1_000).unwrap().is_none());
    }

    #[test]
    fn days_and_seconds_are_those_of_the_wall() {
        let wall: Zoned = "1970-01-02T00:01:05+09:00[+09:00]".parse().unwrap();
        assert_eq!(day_and_second(&wall), (1, 65));
    }
}
