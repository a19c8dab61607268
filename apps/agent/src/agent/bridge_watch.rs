//! Decides whether radios that sleep are worth waking, while something uses the links.
//!
//! ```text
//!  a serial line with `sleep` in the rules, and a client ─▶ each second: LinkHistoryStore::observe ─▶ SchedulerHandle::set_sleeping
//!  gpsd or GeoClue, where the settings name it ─▶ DevicePoint ─▶ ┘
//! ```

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use d2tp_links::Link;
use d2tp_serial::SerialLine;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::device_point::DevicePoint;
use super::state::{Agent, lock};
use super::{geoclue, gpsd};

/// Who knows where the device is.
#[derive(Clone, Copy, Debug)]
pub(super) enum PositionSource {
    /// The gpsd at this address.
    Gpsd(SocketAddr),
    /// GeoClue, on the system bus.
    GeoClue,
}

/// How often outages are judged. Longer: a radio wakes later in an outage that turns out to be long.
const JUDGE_EVERY: Duration = Duration::from_secs(1); // a guess: as often as clients report

/// Whether a link is a serial line whose radio sleeps while another link works.
fn is_sleeper(link: &Link) -> bool {
    let line: Result<SerialLine, _> = link.name.parse();
    line.is_ok_and(|line| line.sleeps)
}

impl Agent {
    /// Judges outages for radios that sleep, while there are any and something uses the links.
    pub(super) async fn watch_sleeping_radios(self: Arc<Agent>, source: Option<PositionSource>) {
        let (mut links, mut changes) = (self.link_view.links(), self.scheduler.changes());
        let (tell, position) = watch::channel(None::<DevicePoint>);
        let mut following: Option<JoinHandle<()>> = None;
        loop {
            let has_sleepers = links.borrow_and_update().iter().any(is_sleeper);
            let is_needed = has_sleepers && self.scheduler.has_clients();
            match (source, is_needed) {
                (Some(source), true) => {
                    let tell = tell.clone();
                    following.get_or_insert_with(|| match source {
                        PositionSource::Gpsd(at) => tokio::spawn(gpsd::follow(at, tell)),
                        PositionSource::GeoClue => tokio::spawn(geoclue::follow(tell)),
                    });
                }
                _ => {
                    if let Some(follows) = following.take() {
                        follows.abort();
                    }
                }
            }
            let point = position.borrow().and_then(DevicePoint::now);
            lock(&self.link_history).set_point(point);
            if is_needed {
                self.look();
            }
            let changed = tokio::select! {
                changed = links.changed() => changed,
                changed = changes.changed() => changed,
                () = tokio::time::sleep(JUDGE_EVERY), if is_needed => Ok(()),
            };
            if changed.is_err() {
                return;
            }
        }
    }
}
